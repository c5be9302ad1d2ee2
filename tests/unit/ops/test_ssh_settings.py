"""What ssh_config and the settings say together."""

import getpass
import hashlib
import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from kueue_ops.address import HostAddress, parse_host
from kueue_ops.ssh_settings import SshConfig
from kueue_ops.trouble import HostTrouble


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(text: str, word: str = "ralab01", **more: str):
        path = tmp_path / "config"
        path.write_text(text)
        return SshConfig(path).target(parse_host(word), **more)

    return make


def test_without_a_file_all_is_as_ssh_does_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    found = SshConfig(tmp_path / "missing").target(parse_host("ralab01"))
    assert (found.name, found.host, found.port, found.user) == ("ralab01", "ralab01", 22, getpass.getuser())
    assert found.key_files == tuple(tmp_path / ".ssh" / name for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
    assert found.known_hosts[0] == found.keys_kept_in == tmp_path / ".ssh/known_hosts"
    assert (found.agent, found.jump, found.proxy_command) == ("", (), "")
    assert not found.accepts_new_key


def test_the_first_value_counts_and_tokens_are_filled_in(target, tmp_path):
    found = target(
        "Host ralab*\n  HostName %h.uni.example\n  Port 2022\n  User ann\n  IdentityFile ~/keys/%h\n"
        "  UserKnownHostsFile ~/known/%h /etc/known\n  HostKeyAlias farm\n"
        "Host *\n  HostName wrong\n  Port 1\n  IdentityFile /last\n"
    )
    assert (found.host, found.port, found.user) == ("ralab01.uni.example", 2022, "ann")
    assert found.key_files == (tmp_path / "keys/ralab01.uni.example", Path("/last"))
    assert found.known_hosts[:2] == (tmp_path / "known/ralab01.uni.example", Path("/etc/known"))
    assert (found.entry, found.known_port) == ("farm", 22)
    assert found.command_line == "ssh -p 2022 ann@ralab01"


def test_a_file_in_the_home_of_an_unknown_user_is_one_that_is_not_there(target):
    gone = "~nobody-of-this-name/key"
    found = target(f"Host *\n UserKnownHostsFile {gone}\n IdentityAgent {gone}\n", key_file=gone)
    assert (found.key_files, found.keys_kept_in, found.agent) == ((Path(gone),), Path(gone), gone)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("%k", "ralab01"),
        ("%h:%p-%n", "ralab01.uni.example:2022-ralab01"),
        ("%r@%L/%l", "ann@lab/lab.uni.example"),
        ("%u-%i", f"{getpass.getuser()}-{os.getuid()}"),
        ("%%h", "%h"),
        ("%d/k", "{home}/k"),
        ("${{HOME}}/${{HOME}}", "{home}/{home}"),
        ("$HOME-{{", "$HOME-{{"),
        ("%C", hashlib.sha1(b"lab.uni.exampleralab01.uni.example2022anngate").hexdigest()),
        ("%j", "gate"),
    ],
)
def test_every_token_that_ssh_knows_in_file_names_is_filled_in(target, tmp_path, monkeypatch, name, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: "lab.uni.example")
    file, wanted = (f"/x/{text.format(home=tmp_path)}" for text in (name, expected))
    found = target(
        f"Host *\n HostName %h.uni.example\n Port 2022\n User ann\n ProxyJump gate\n IdentityFile {file}\n"
        f" UserKnownHostsFile {file}\n GlobalKnownHostsFile {file}\n IdentityAgent {file}\n"
    )
    assert (found.keys_kept_in, found.key_files, found.agent) == (Path(wanted), (Path(wanted),), str(Path(wanted)))
    assert found.known_hosts[1] == Path(file)  # ssh(1) takes that one as it is


def test_the_token_of_the_host_key_is_its_alias_where_it_has_one(target):
    assert target("Host *\n HostKeyAlias farm\n UserKnownHostsFile /known/%k\n").keys_kept_in == Path("/known/farm")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@pytest.mark.parametrize("alias", ["", " HostKeyAlias farm\n"])
def test_ssh_itself_makes_the_same_of_tokens(target, tmp_path, alias):
    file = "/x/%C/%d/%h/%i/%k/%L/%l/%n/%p/%r/%u/%%"
    found = target(f"Host *\n HostName lab.%h\n Port 2022\n User ann\n UserKnownHostsFile {file}\n{alias}")
    words = ["ssh", "-F", str(tmp_path / "config"), "-G", "ralab01"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (expected,) = (line.split()[1] for line in told.splitlines() if line.startswith("userknownhostsfile "))
    if "%C" in expected:
        pytest.skip("this ssh shows tokens as they are")
    # It knows its user's home from the password database.
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert str(found.keys_kept_in).replace(str(tmp_path), home) == str(Path(expected))


@pytest.mark.parametrize("name", ["/x/%z", "/x/%", "/x/${NOT_SET_ANYWHERE}"])
@pytest.mark.parametrize("option", ["UserKnownHostsFile", "IdentityFile", "IdentityAgent"])
def test_a_token_that_stands_for_nothing_is_told(target, option, name):
    with pytest.raises(HostTrouble, match="stands for nothing"):
        target(f"Host *\n {option} {name}\n")


@pytest.mark.parametrize(
    ("word", "default", "expected"),
    [("bob@ralab01", "carl", "bob"), ("ralab01", "carl", "carl"), ("ralab01", "", "ann")],
)
def test_the_login_is_that_of_the_address_then_of_the_settings_then_of_the_file(target, word, default, expected):
    found = target("Host *\n User ann\n ProxyCommand nc %r %h %p\n", word, default_user=default)
    assert found.user == expected
    assert found.proxy_command == f"nc {expected} ralab01 22"


def test_the_port_of_the_address_wins_and_reaches_the_proxy_command(target):
    assert target("Host *\n Port 1\n ProxyCommand nc %h %p\n", "ralab01:2222").proxy_command == "nc ralab01 2222"


def test_a_key_file_of_the_settings_takes_the_place_of_the_others(target, tmp_path):
    assert target("Host *\n IdentityFile /a\n", key_file="~/lab_key").key_files == (tmp_path / "lab_key",)


def test_included_files_count_where_they_stand_and_end_their_blocks(target, tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a").write_text("Host other\n Port 7\n")
    (tmp_path / "conf.d" / "b").write_text("Host ralab01\n Port 8\n")
    found = target("Host ralab01\n Include conf.d/*\n User ann\nHost *\n Port 9\n")
    assert (found.port, found.user) == (8, "ann")


def test_a_file_that_includes_itself_is_told(target):
    with pytest.raises(HostTrouble, match="includes itself"):
        target("Include config\n")


def test_jumps_are_read_with_login_and_port(target):
    found = target("Host *\n ProxyJump ann@gate:2222,ssh://[fe80::1]:22/\n ProxyCommand false\n")
    assert found.jump == (
        HostAddress("ann@gate:2222", "ann", "gate", 2222),
        HostAddress("[fe80::1]:22", None, "fe80::1", 22),
    )
    assert found.proxy_command == ""


@pytest.mark.parametrize("text", ["Host *\n ProxyJump none\n", "Host *\n ProxyCommand none\n"])
def test_none_is_no_way(target, text):
    found = target(text)
    assert (found.jump, found.proxy_command) == ((), "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("IdentityAgent none", ""), ("IdentityAgent /a/b", "/a/b"), ("IdentityAgent $MINE", "/mine"), ("", "/env")],
)
def test_the_agent_is_the_one_that_is_named(target, monkeypatch, line, expected):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/env")
    monkeypatch.setenv("MINE", "/mine")
    assert target(f"Host *\n {line}\n").agent == expected


@pytest.mark.parametrize(("word", "accepts"), [("yes", False), ("ask", False), ("accept-new", True), ("no", True)])
def test_a_new_key_is_accepted_only_on_purpose(target, word, accepts):
    assert target(f"Host *\n StrictHostKeyChecking {word}\n").accepts_new_key is accepts


@pytest.mark.parametrize("text", ["Host *\n Port many\n", "???\n", 'Host "a\n', "Host *\n ProxyJump a:b:c:z\n"])
def test_a_file_that_cannot_be_understood_is_one_sentence(target, text):
    with pytest.raises(HostTrouble) as caught:
        target(text)
    assert caught.value.trouble.kind == "ssh"
    assert "ralab01" in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Match -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criteria", "holds"),
    [
        ("exec true", True),
        ("exec false", False),
        ("!exec false", True),
        ('exec "test %n = ralab01"', True),
        ('exec "read line"', False),  # it has no terminal to read from
        ("host other exec true", False),
        ("host ralab* exec true", True),
        ("localnetwork 127.0.0.0/8", True),
        ("localnetwork 240.0.0.0/4,2001:db8::/32", False),
        ("!localnetwork 240.0.0.0/4", True),
        ("tagged work", False),
        ("sessiontype shell", False),
    ],
)
def test_a_block_counts_where_its_criteria_hold(target, criteria, holds):
    assert (target(f"Match {criteria}\n  Port 7\n").port == 7) is holds


def test_a_command_of_match_is_not_run_where_what_stands_before_it_does_not_hold(target, tmp_path):
    target(f'Match host other exec "touch {tmp_path}/ran"\n  Port 7\n')
    assert not (tmp_path / "ran").exists()


def test_a_command_of_match_that_hangs_is_ended_and_told(target, monkeypatch):
    monkeypatch.setattr("kueue_ops.ssh_settings._MATCH_SECONDS", 0.2)
    with pytest.raises(HostTrouble) as caught:
        target('Match exec "sleep 1000"\n  Port 7\n')
    assert "'Match exec sleep 1000' of the ssh configuration did not end within 0.2 s" in str(caught.value)


def test_a_user_without_a_file_of_known_hosts_leaves_that_of_the_system_alone(target):
    found = target("Host *\n UserKnownHostsFile none\n GlobalKnownHostsFile /etc/all\n StrictHostKeyChecking no\n")
    assert found.known_hosts == (Path("/etc/all"),)
    assert found.keys_kept_in is None
