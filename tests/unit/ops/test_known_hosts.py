"""known_hosts files, against lines as ssh-keygen writes them."""

import base64
import hashlib
import hmac

import pytest

from kueue_ops.known_hosts import entry_name, fingerprint, look_up, remember
from kueue_ops.trouble import HostTrouble

KEY = base64.b64encode(b"key one").decode()
OTHER = base64.b64encode(b"key two").decode()


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "known_hosts"


@pytest.mark.parametrize(
    ("line", "host", "port", "is_known"),
    [
        ("a ssh-ed25519 {}", "a", 22, True),
        ("A,b ssh-ed25519 {} comment here", "a", 22, True),
        ("b,a ssh-ed25519 {}", "A", 22, True),
        ("[a]:2222 ssh-ed25519 {}", "a", 2222, True),
        ("[a]:2222 ssh-ed25519 {}", "a", 22, False),
        ("[a]:2222 ssh-ed25519 {}", "a", 2223, False),
        ("a ssh-ed25519 {}", "a", 2222, True),
        ("*.lab,!bad.lab ssh-ed25519 {}", "x.lab", 22, True),
        ("*.lab,!bad.lab ssh-ed25519 {}", "bad.lab", 22, False),
        ("[*.lab]:2222 ssh-ed25519 {}", "x.lab", 2222, True),
        ("ralab?? ssh-ed25519 {}", "ralab07", 22, True),
        ("[fe80::1]:2222 ssh-ed25519 {}", "fe80::1", 2222, True),
        ("ab ssh-ed25519 {}", "a", 22, False),
        ("# a ssh-ed25519 {}", "a", 22, False),
        ("a ssh-ed25519", "a", 22, False),
        ("a ssh-ed25519 !!!!", "a", 22, False),
        ("|1|zz ssh-ed25519 {}", "a", 22, False),
        ("|1|!|! ssh-ed25519 {}", "a", 22, False),
        ("|1|\xff|\xff ssh-ed25519 {}", "a", 22, False),
        ("a ssh-ed25519 \xff", "a", 22, False),
        ("@cert-authority * ssh-ed25519 {}", "a", 22, False),
        ("@unheard-of a ssh-ed25519 {}", "a", 22, False),
    ],
)
def test_a_line_names_a_host_or_does_not(file, line, host, port, is_known):
    file.write_text(f"\n\x00\xff garbage\n{line.format(KEY)}\n", encoding="latin-1")
    assert look_up([file], host, port).knows(b"key one") is is_known


@pytest.mark.parametrize(("host", "port"), [("ralab01", 22), ("ralab01", 2222)])
def test_hashed_names_are_known(file, host, port):
    file.write_text(f"{hashed('other')} ssh-ed25519 {OTHER}\n{hashed(entry_name(host, port))} ssh-ed25519 {KEY}\n")
    known = look_up([file], host.upper(), port)
    assert known.knows(b"key one")
    assert not known.knows(b"key two")


def test_an_entry_of_the_port_hides_the_one_of_the_plain_name(file):
    file.write_text(f"a ssh-ed25519 {KEY}\n[a]:2222 ssh-ed25519 {OTHER}\n")
    known = look_up([file], "a", 2222)
    assert known.knows(b"key two")
    assert not known.knows(b"key one")


def test_the_key_of_another_port_is_good_and_asked_for_but_no_sign_of_a_change(file):
    file.write_text(f"a ssh-ed25519 {KEY}\n")
    known = look_up([file], "a", 2222)
    assert known.knows(b"key one")
    assert known.types == ("ssh-ed25519",)
    assert known.keys == []


def test_all_files_and_all_kinds_of_keys_count(file, tmp_path):
    second = tmp_path / "second"
    file.write_text(f"a ssh-rsa {KEY}\n")
    second.write_text(f"a ssh-ed25519 {OTHER}\n@revoked a ssh-ed25519 {KEY}\n@cert-authority a ssh-rsa {KEY}\n")
    known = look_up([tmp_path / "missing", file, second], "a", 22)
    assert known.types == ("ssh-rsa", "ssh-ed25519")
    assert [key.where for key in known.keys] == [f"{file}:1", f"{second}:1"]
    assert [key.blob for key in known.revoked] == [b"key one"]
    assert known.has_authority


def test_a_file_that_cannot_be_read_is_no_empty_file(tmp_path):
    with pytest.raises(HostTrouble, match="cannot be read"):
        look_up([tmp_path], "a", 22)


def test_a_remembered_key_is_known_and_the_file_private(tmp_path):
    file = tmp_path / "ssh" / "known_hosts"
    assert remember(file, entry_name("a", 2222), "ssh-ed25519", b"key one")
    assert look_up([file], "a", 2222).knows(b"key one")
    assert file.stat().st_mode & 0o777 == 0o600
    assert not remember(file / "below", "a", "ssh-ed25519", b"key one")


def test_a_fingerprint_is_as_ssh_shows_it():
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"


def test_a_key_is_remembered_below_a_last_line_that_has_no_end(file):
    file.write_text(f"a ssh-ed25519 {KEY}")
    assert remember(file, "b", "ssh-ed25519", b"key two")
    assert look_up([file], "a", 22).knows(b"key one")
    assert look_up([file], "b", 22).knows(b"key two")
    assert file.read_text().count("\n") == 2
