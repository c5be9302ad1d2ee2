"""From the shared secret to mutual TLS: one key, one self-signed certificate, the same at both ends.

Rules
- secret → scrypt → Ed25519 key → certificate from a fixed template, byte for byte the same everywhere. Whoever can
  present exactly it holds the secret.
- TLS 1.3 alone, both sides present it, no tickets, no resumption; it is compared again after the handshake.
- With two secrets (rotation) the client names the one it uses, the server answers with the same, and a client that was
  refused with one tries the other.
- The key derivation (a third of a second, 128 MiB) runs once per secret and machine; its result is cached as PEM, 0600.
  The secret itself is never written.
- Importing this module loads neither ssl nor cryptography nor OpenSSL: the command may find all it needs in the cache.

Why this way: a certificate authority or key files would be one more thing to install on each machine; a protocol of
our own over the secret would be one more thing to get wrong. Anybody who can reach the server gets to see the
certificate and can guess off-line, at the price of one scrypt for each guess: hence the lower bound on the secret.
"""
# pathlib is left out for the command's start-up time:
# ruff: noqa: PTH123

from __future__ import annotations

import os
from binascii import a2b_base64, b2a_base64, hexlify

from kueue import whole_file
from kueue.errors import ConfigError, KueueError, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from typing import Any

AUTHENTICATION_FAILED = "Authentication failed!"

_DERIVE_SALT = b"kueue shared secret, version 1: key"
_CACHE_SALT = b"kueue shared secret, version 1: cache entry"
# N and r as recommended for interactive use on present machines (RFC 7914 has smaller ones of 2009): 128 MiB a guess.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**17, 8, 1


class Identity:
    """One secret's key and certificate."""

    def __init__(self, pem: bytes, path: str = "") -> None:
        self.pem = pem
        """Key and certificate as PEM."""
        self.path = path
        """The file in the cache that holds `pem`; empty if it could not be written."""
        self.certificate = _certificate_of(pem)
        """DER."""
        self.fingerprint = hexlify(_sha256(self.certificate)).decode("ascii")[:16]
        """Short name of this secret, for socket names and logs. It is made of the certificate, not of the secret:
        guessing from it costs one scrypt for each guess, as guessing against the server does."""

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint})"

    @property
    def server_hostname(self) -> str:
        """What a client names in the handshake (SNI), so that a server with two secrets presents the client's one."""
        return f"k{self.fingerprint[:4]}.kueue"

    def client_context(self) -> ssl.SSLContext:
        """Presents this certificate and accepts no other; its connections name `server_hostname` by themselves."""
        import ssl  # noqa: PLC0415  the local socket does without

        class NamingContext(ssl.SSLContext):
            def wrap_socket(self, *args: Any, **more: Any) -> ssl.SSLSocket:
                return super().wrap_socket(*args, **{**more, "server_hostname": hostname})

            def wrap_bio(self, *args: Any, **more: Any) -> ssl.SSLObject:
                return super().wrap_bio(*args, **{**more, "server_hostname": hostname})

        hostname = self.server_hostname
        return self._prepared(NamingContext(ssl.PROTOCOL_TLS_CLIENT))

    def server_context(self, also: Sequence[Identity] = ()) -> ssl.SSLContext:
        """Presents and accepts this certificate; to a client that names one of `also`, that one."""
        context = self._answering()
        # One context for each: OpenSSL looks trusted certificates up by subject and finds only the first of a name.
        others = {other.server_hostname: other._answering() for other in also}  # noqa: SLF001
        others.pop(self.server_hostname, None)

        def choose(socket: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            if name in others:
                socket.context = others[name]

        if others:
            context.sni_callback = choose
        return context

    def _answering(self) -> ssl.SSLContext:
        import ssl  # noqa: PLC0415  as above

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return self._prepared(context)

    def _prepared(self, context: ssl.SSLContext) -> ssl.SSLContext:
        import ssl  # noqa: PLC0415  as above

        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET
        try:
            self._load(context)
            context.load_verify_locations(cadata=self.certificate)
        except ssl.SSLError as error:
            raise _no_crypto(error) from error
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        # The standard library reads keys from files only; memory that looks like a file never reaches a disk.
        descriptor = os.memfd_create("kueue-identity", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self.pem)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


def is_known(peer: bytes | None, identities: Sequence[Identity]) -> bool:
    """Is the certificate a peer presented (DER, as `getpeercert(True)` gives it) exactly one of ours?"""
    import hmac  # noqa: PLC0415  only after a handshake, when OpenSSL is loaded anyway

    return peer is not None and any(hmac.compare_digest(peer, identity.certificate) for identity in identities)


def check_peer(peer: bytes | None, identities: Sequence[Identity]) -> None:
    """Raises `Refused` unless `is_known`."""
    if not is_known(peer, identities):
        raise Refused(AUTHENTICATION_FAILED, hint="The shared_secret here and at the server must be equal.")


def identity_of(secret: str, cache_dir: str | None = None) -> Identity:
    """The identity of a secret; read from `cache_dir` (0700, ours) if it is there, else derived and kept there.

    Raises `ConfigError` when this machine's cryptography refuses (FIPS mode).
    """
    if not secret:
        raise ConfigError("There is no shared secret.", hint="Set common_settings.shared_secret.")
    path = _cache_path(secret, cache_dir)
    found = kept(secret, cache_dir)
    if found is not None:
        return found
    pem = derive(secret)
    return Identity(pem, path if path and _keep(path, pem) else "")


def kept(secret: str, cache_dir: str | None) -> Identity | None:
    """The identity of a secret if the cache has it; nothing is derived and nothing written."""
    path = _cache_path(secret, cache_dir) if secret else ""
    return _cached(path) if path else None


def _cache_path(secret: str, cache_dir: str | None) -> str:
    return f"{cache_dir}/identity-{_cache_name(secret)}.pem" if cache_dir else ""


def identities(current: str, previous: str = "", cache_dir: str | None = None) -> list[Identity]:
    """The identities of the present secret and, if there is one, of the one before it; in this order."""
    return [identity_of(secret, cache_dir) for secret in dict.fromkeys((current, previous)) if secret]


def derive(secret: str) -> bytes:
    """Key and certificate of a secret, as PEM. Deterministic. Takes a third of a second and 128 MiB."""
    import hashlib  # noqa: PLC0415  10 ms that the cache saves

    try:
        seed = hashlib.scrypt(
            secret.encode("utf-8"),
            salt=_DERIVE_SALT,
            n=_SCRYPT_N,
            r=_SCRYPT_R,
            p=_SCRYPT_P,
            maxmem=2**28,  # twice what it needs; OpenSSL's own limit is 32 MiB
            dklen=32,
        )
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  50 ms that the cache saves
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415  as above

        key = Ed25519PrivateKey.from_private_bytes(seed)
        public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        body = _to_be_signed(public)
        certificate = _der(0x30, body + _ED25519 + _der(0x03, b"\0" + key.sign(body)))
    except MemoryError as error:
        raise KueueError("Not enough memory to derive the key from the shared secret (128 MiB).") from error
    except ImportError as error:
        raise ConfigError(
            f"The Python package cryptography cannot be used: {error}.",
            hint="Install kueue anew: pip install kueue-lab",
        ) from error
    except (ValueError, AttributeError) as error:
        raise _no_crypto(error) from error
    except Exception as error:
        # cryptography's UnsupportedAlgorithm is an Exception of its own; importing it to name it may fail as well.
        if type(error).__name__ != "UnsupportedAlgorithm":
            raise
        raise _no_crypto(error) from error
    # PKCS #8 of an Ed25519 key (RFC 8410, section 7): version 0, algorithm, the seed in an octet string twice.
    private = _der(0x30, _der(0x02, b"\0") + _ED25519 + _der(0x04, _der(0x04, seed)))
    return _pem("PRIVATE KEY", private) + _pem("CERTIFICATE", certificate)


def _no_crypto(error: BaseException) -> ConfigError:
    return ConfigError(
        f"This machine's cryptography cannot make or use kueue's certificate: {error}.",
        hint="kueue needs scrypt and Ed25519. A system in FIPS mode forbids them: switch it off "
        "(fips-mode-setup --check) or use a Python with an OpenSSL of its own.",
    )


# --- the certificate (RFC 5280): a fixed template with the public key filled in --------------------------------------


def _der(tag: int, body: bytes) -> bytes:
    size = len(body)
    if size < 0x80:
        return bytes((tag, size)) + body
    octets = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(octets))) + octets + body


_ED25519 = bytes.fromhex("300506032b6570")  # AlgorithmIdentifier 1.3.101.112 (RFC 8410)
_NAME = bytes.fromhex("3010310e300c06035504030c05") + b"kueue"  # CN = kueue
_BASIC_CONSTRAINTS = bytes.fromhex("300c0603551d130101ff04023000")  # critical, no authority


def _to_be_signed(public: bytes) -> bytes:
    return _der(
        0x30,
        b"".join(
            (
                bytes.fromhex("a003020102"),  # version 3
                bytes.fromhex("020101"),  # serial number 1
                _ED25519,
                _NAME,
                # A wrong clock must not lock anybody out: valid from 1970-01-01 to 9999-12-31.
                _der(0x30, _der(0x17, b"700101000000Z") + _der(0x18, b"99991231235959Z")),
                _NAME,
                _der(0x30, _ED25519 + _der(0x03, b"\0" + public)),
                _der(0xA3, _der(0x30, _BASIC_CONSTRAINTS)),
            )
        ),
    )


def _pem(label: str, body: bytes) -> bytes:
    text = b2a_base64(body, newline=False)
    lines = b"\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (label.encode(), lines, label.encode())


def _certificate_of(pem: bytes) -> bytes:
    _, found, rest = pem.partition(b"-----BEGIN CERTIFICATE-----\n")
    body, end, _ = rest.partition(b"-----END CERTIFICATE-----")
    if not (found and end):
        raise ValueError("no certificate")
    return a2b_base64(body)


# --- the cache --------------------------------------------------------------------------------------------------------


def _sha256(body: bytes) -> bytes:
    # hashlib loads OpenSSL, 10 ms of every command; the built-in implementation has had two names.
    try:
        from _sha2 import sha256  # type: ignore[import-not-found]  # noqa: PLC0415  Python 3.12 and later
    except ImportError:
        try:
            from _sha256 import sha256  # type: ignore[import-not-found]  # noqa: PLC0415  until Python 3.11
        except ImportError:
            from hashlib import sha256  # noqa: PLC0415  a Python built without it
    return bytes(sha256(body).digest())


def _cache_name(secret: str) -> str:
    return hexlify(_sha256(_CACHE_SALT + b"\0" + secret.encode("utf-8", "surrogatepass"))).decode("ascii")[:32]


def _cached(path: str) -> Identity | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        pem = file.read(10_000)
    try:
        # Whole only if it ends as it should; a torn one is made anew.
        return Identity(pem, path) if pem.endswith(b"-----END CERTIFICATE-----\n") else None
    except ValueError:
        return None


def _keep(path: str, pem: bytes) -> bool:
    """Put the PEM into the cache. A failure costs a third of a second each time, so nobody need hear of it."""
    try:
        whole_file.write(path, pem)
    except OSError:
        return False
    return True
