"""From the secret to mutual TLS: determinism, refusals, rotation, the cache."""

import hashlib
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading

import pytest

from kueue import identity
from kueue.errors import ConfigError, Refused


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("identities"))


@pytest.fixture(scope="session")
def ours(cache):
    return identity.identity_of("keep private!", cache)


@pytest.fixture(scope="session")
def other(cache):
    return identity.identity_of("another secret", cache)


@pytest.fixture(scope="session")
def third(cache):
    return identity.identity_of("a third secret", cache)


def test_one_secret_gives_the_same_certificate_on_every_machine_and_in_every_release(ours):
    # Golden: if this changes, machines with the old and the new release refuse each other.
    assert (
        hashlib.sha256(ours.certificate).hexdigest()
        == "8a466456ace3cd8e904c9d212c90a73251b183a286b0def36a0c32bea516e3ff"
    )
    assert ours.fingerprint == "8a466456ace3cd8e"


def test_another_secret_gives_another(ours, other):
    assert ours.certificate != other.certificate
    assert ours.fingerprint != other.fingerprint


def test_the_certificate_is_what_the_template_promises(ours):
    x509 = pytest.importorskip("cryptography.x509")
    certificate = x509.load_der_x509_certificate(ours.certificate)
    assert certificate.serial_number == 1
    assert certificate.subject.rfc4514_string() == certificate.issuer.rfc4514_string() == "CN=kueue"
    assert [extension.oid._name for extension in certificate.extensions] == ["basicConstraints"]
    certificate.verify_directly_issued_by(certificate)


class Ends:
    """What each side of one handshake saw: the peer's certificate, or its error."""

    def __init__(self, server, client):
        a, b = socket.socketpair()
        self.server = self.client = None

        def serve():
            try:
                with server.wrap_socket(a, server_side=True) as secure:
                    self.server = secure.getpeercert(True)
                    self.version = secure.version()
                    secure.sendall(b"w")
            except OSError as error:
                self.server = error
            finally:
                a.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with client.wrap_socket(b) as secure:
                read = secure.recv(1)
                self.client = secure.getpeercert(True) if read else None
        except OSError as error:
            self.client = error
        finally:
            b.close()
        thread.join()


def test_two_ends_with_one_secret_prove_it_to_each_other(ours):
    ends = Ends(ours.server_context(), ours.client_context())
    assert ends.server == ends.client == ours.certificate
    assert ends.version == "TLSv1.3"


def test_ends_with_different_secrets_refuse_each_other(ours, other):
    ends = Ends(ours.server_context(), other.client_context())
    assert isinstance(ends.client, ssl.SSLCertVerificationError)
    assert isinstance(ends.server, ssl.SSLError)


def anybody(protocol):
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_a_client_without_a_certificate_is_refused(ours):
    ends = Ends(ours.server_context(), anybody(ssl.PROTOCOL_TLS_CLIENT))
    assert isinstance(ends.server, ssl.SSLError)
    assert isinstance(ends.client, ssl.SSLError), "the alert comes with the first read"


def test_a_client_with_a_copied_certificate_but_no_key_is_refused(ours, other, tmp_path):
    # The certificate is public: only the key proves the secret.
    pem = other.pem.decode()
    stolen = ssl.DER_cert_to_PEM_cert(ours.certificate)
    (tmp_path / "mixed.pem").write_text(pem[: pem.index("-----BEGIN CERT")] + stolen)
    with pytest.raises(ssl.SSLError):
        anybody(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(tmp_path / "mixed.pem")


def test_a_certificate_signed_by_ours_is_not_ours(ours, tmp_path):
    """Nobody but a holder of the secret could make one; but even then exactly one certificate counts."""
    from datetime import datetime, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = serialization.load_pem_private_key(ours.pem, None)
    child = Ed25519PrivateKey.generate()
    name = x509.load_der_x509_certificate(ours.certificate).subject
    certificate = x509.CertificateBuilder(
        name,
        x509.Name([]),
        child.public_key(),
        2,
        datetime(2000, 1, 1, tzinfo=timezone.utc),
        datetime(2100, 1, 1, tzinfo=timezone.utc),
    ).sign(key, None)
    (tmp_path / "child.pem").write_bytes(
        child.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = anybody(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(tmp_path / "child.pem")
    assert isinstance(Ends(ours.server_context(), context).server, ssl.SSLError)
    with pytest.raises(Refused, match="Authentication failed!"):
        identity.check_peer(certificate.public_bytes(serialization.Encoding.DER), [ours])


def test_older_tls_is_refused(ours):
    context = ours.client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert isinstance(Ends(ours.server_context(), context).server, ssl.SSLError)


@pytest.mark.parametrize("secret", ["ours", "other"])
def test_while_a_secret_is_being_changed_both_are_served(ours, other, secret):
    chosen = {"ours": ours, "other": other}[secret]
    ends = Ends(ours.server_context([other]), chosen.client_context())
    assert ends.server == ends.client == chosen.certificate


def test_a_third_secret_is_refused_by_a_server_with_two(ours, other, third):
    assert isinstance(Ends(ours.server_context([other]), third.client_context()).client, ssl.SSLError)


def test_no_session_can_be_resumed(ours):
    a, b = socket.socketpair()
    with a, b:
        server = ours.server_context()

        def serve():
            with server.wrap_socket(a, server_side=True) as secure:
                secure.sendall(b"w")
                secure.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with ours.client_context().wrap_socket(b) as secure:
            secure.recv(1)
            assert secure.session is None or not secure.session.has_ticket
        thread.join()


def test_check_peer_accepts_exactly_the_known(ours, other):
    identity.check_peer(ours.certificate, [other, ours])
    for peer in (None, b"", other.certificate, ours.certificate + b"\0"):
        with pytest.raises(Refused):
            identity.check_peer(peer, [ours])


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_derived_key_is_kept_private_and_without_the_secret(tmp_path):
    made = identity.identity_of("a secret for this test", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert str(file) == made.path
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"a secret" not in file.read_bytes()
    plain = hashlib.sha256(b"a secret for this test").hexdigest()
    assert plain[:8] not in file.name


def test_the_cached_key_is_used_and_a_damaged_or_open_one_is_not(ours, cache, tmp_path):
    name = os.path.basename(ours.path)
    fake = tmp_path / name
    found = identity.identity_of("another secret", cache)
    fake.write_bytes(found.pem)
    fake.chmod(0o600)
    assert identity.identity_of("keep private!", str(tmp_path)).fingerprint == found.fingerprint, (
        "the cache was not used"
    )
    fake.chmod(0o644)
    assert identity.identity_of("keep private!", str(tmp_path)).fingerprint == ours.fingerprint
    fake.write_bytes(ours.pem[:-30])
    fake.chmod(0o600)
    assert identity.identity_of("keep private!", str(tmp_path)).pem == ours.pem
    assert fake.read_bytes() == ours.pem


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    made = identity.identity_of("keep private!", str(tmp_path / "none"))
    assert made.path == ""
    assert made.fingerprint == "8a466456ace3cd8e"


def test_the_identities_of_a_change_come_present_first_and_never_twice(cache, ours, other):
    found = identity.identities("keep private!", "another secret", cache)
    assert [each.fingerprint for each in found] == [ours.fingerprint, other.fingerprint]
    assert len(identity.identities("keep private!", "keep private!", cache)) == 1
    with pytest.raises(ConfigError):
        identity.identity_of("")


def test_a_machine_that_forbids_scrypt_says_why(monkeypatch):
    def forbidden(*_, **__):
        raise ValueError("[digital envelope routines] unsupported")

    monkeypatch.setattr(hashlib, "scrypt", forbidden)
    with pytest.raises(ConfigError, match="unsupported") as caught:
        identity.derive("keep private!")
    assert "FIPS" in caught.value.hint


def test_with_a_cached_key_neither_openssl_nor_cryptography_is_loaded(ours, cache):
    code = (
        f"import sys; sys.path.insert(0, {os.getcwd()!r}); from kueue import identity; "
        f"found = identity.identity_of('keep private!', {cache!r}); "
        "print(found.fingerprint, *sorted({'ssl', '_ssl', '_hashlib', 'hashlib', 'cryptography', 'hmac'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [ours.fingerprint]


def test_plain_ssl_needs_no_cryptography_when_cached(ours, cache):
    code = (
        f"import sys; sys.path.insert(0, {os.getcwd()!r}); from kueue import identity; "
        f"identity.identity_of('keep private!', {cache!r}).client_context(); print('cryptography' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
