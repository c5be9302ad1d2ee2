"""Reaching hosts: a real sshd, real keys, real agents, and hosts that misbehave at every step."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kueue_ops.address import HostAddress, parse_host
from kueue_ops.remote import HostTrouble, Remote, RemoteOptions
from kueue_ops.ssh import HostConnection, Limits
from kueue_ops.ssh_settings import SshConfig
from tests.support.ports import free_port
from tests.support.sshd import Sshd, descendants, make_key, need

LIMITS = Limits(10, 20)


@pytest.fixture
def new_host(tmp_path):
    hosts = []

    def make(name="sshd", **more):
        hosts.append(Sshd(tmp_path, name=name, **more))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def host(new_host):
    return new_host().start()


def connect(host, address=None, limits=LIMITS, **more):
    return HostConnection(address or host.address, SshConfig(host.ssh_config), limits, **more)


def says(host, address=None, **more) -> str:
    with connect(host, address, **more) as connection:
        return connection.run("echo hello").stdout


def trouble_of(host, address=None, **more):
    with pytest.raises(HostTrouble) as caught:
        says(host, address, **more)
    trouble = caught.value.trouble
    assert "\n" not in trouble.sentence
    assert "Traceback" not in trouble.sentence
    return trouble


# --- keys of hosts ---------------------------------------------------------------------------------------------------


def test_a_host_whose_key_is_known_lets_us_in(host):
    assert says(host) == "hello\n"


def test_a_known_key_of_another_kind_than_the_host_prefers_is_asked_for(new_host, tmp_path):
    second = make_key(tmp_path / "rsa", kind="rsa")
    host = new_host(config=(f"HostKey {second}",)).start()
    host.trust(second)
    assert says(host) == "hello\n"


def test_hashed_entries_are_known(host):
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(host.known_hosts)], check=True, capture_output=True)
    assert "127.0.0.1" not in host.known_hosts.read_text()
    assert says(host) == "hello\n"


def test_an_unknown_key_is_refused_with_what_to_type_and_nothing_is_written(host):
    host.known_hosts.write_text("")
    trouble = trouble_of(host)
    assert trouble.kind == "unknown_key"
    assert "SHA256:" in trouble.sentence
    assert f"ssh -p {host.port} {host.user}@127.0.0.1" in trouble.hint
    assert host.known_hosts.read_text() == ""


def test_a_changed_key_is_another_sentence_even_when_new_ones_are_accepted(host, tmp_path):
    host.trust(make_key(tmp_path / "other"))
    host.write_ssh_config("StrictHostKeyChecking no")
    trouble = trouble_of(host)
    assert trouble.kind == "changed_key"
    assert f"{host.known_hosts}:1" in trouble.sentence
    assert f"ssh-keygen -R '[127.0.0.1]:{host.port}'" in trouble.hint


def test_a_second_sshd_on_another_port_is_unknown_and_not_changed(host, tmp_path):
    kind, blob = make_key(tmp_path / "first").with_suffix(".pub").read_text().split()[:2]
    plain = f"127.0.0.1 {kind} {blob}\n"
    host.known_hosts.write_text(plain)
    assert trouble_of(host).kind == "unknown_key"
    host.write_ssh_config("StrictHostKeyChecking accept-new")
    with connect(host) as connection:
        assert "and remembered" in connection.remarks[0]
    host.write_ssh_config()
    assert says(host) == "hello\n"
    assert host.known_hosts.read_text().startswith(f"{plain}[127.0.0.1]:{host.port} ")


def test_a_revoked_key_is_refused(host):
    host.known_hosts.write_text(
        host.known_hosts.read_text() + "@revoked * " + host.known_hosts.read_text().split(" ", 1)[1]
    )
    assert trouble_of(host).kind == "changed_key"


def test_a_new_key_that_ssh_config_accepts_is_remembered_and_told(host):
    host.known_hosts.write_text("")
    host.write_ssh_config("StrictHostKeyChecking accept-new")
    with connect(host) as connection:
        assert "accepted" in connection.remarks[0]
    host.write_ssh_config()
    assert says(host) == "hello\n"


# --- our keys --------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path):
    """A running agent; `add` gives it a key."""
    need("ssh-agent", "ssh-add")
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)

    class Agent:
        socket = path

        @staticmethod
        def add(key: Path, passphrase: str = "") -> None:
            ask = tmp_path / "ask"
            ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
            ask.chmod(0o755)
            env = {**os.environ, "SSH_AUTH_SOCK": str(path), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
            subprocess.run(["ssh-add", str(key)], check=True, env=env, stdin=subprocess.DEVNULL, capture_output=True)

    yield Agent
    process.kill()
    process.wait()


def accept(host, key: Path) -> None:
    (host.folder / "authorized_keys").write_text(key.with_suffix(".pub").read_text())


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_keys_of_every_kind_are_taken_from_file_and_agent(host, agent, tmp_path, kind):
    key = make_key(tmp_path / "mine", kind=kind)
    accept(host, key)
    host.write_ssh_config(key=key)
    assert says(host) == "hello\n"
    agent.add(key)
    host.write_ssh_config(key=tmp_path / "missing", agent=agent.socket)
    assert says(host) == "hello\n"


def test_a_key_with_a_passphrase_is_served_by_the_agent(host, agent, tmp_path):
    key = make_key(tmp_path / "mine", passphrase="very secret")
    accept(host, key)
    agent.add(key, "very secret")
    host.write_ssh_config(key=key, agent=agent.socket)
    assert says(host) == "hello\n"


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_a_locked_key_without_an_agent_is_told_and_nobody_is_asked(host, tmp_path, monkeypatch, kind):
    key = make_key(tmp_path / "mine", passphrase="very secret", kind=kind)
    accept(host, key)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("getpass.getpass", lambda *_: pytest.fail("somebody was asked"))
    host.write_ssh_config(key=key, agent="SSH_AUTH_SOCK")
    trouble = trouble_of(host)
    assert trouble.kind == "authentication"
    assert f"the key {key} is locked and no agent has it" in trouble.sentence
    assert "SSH_AUTH_SOCK is not set" in trouble.sentence
    assert f"ssh-add {key}" in trouble.hint


def test_a_stale_agent_is_named(host, tmp_path, monkeypatch):
    key = make_key(tmp_path / "mine", passphrase="very secret")
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(stale))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(stale))
    host.write_ssh_config(key=key, agent="SSH_AUTH_SOCK")
    trouble = trouble_of(host)
    assert f"the agent at {stale} does not answer (Connection refused)" in trouble.sentence


def test_an_agent_that_says_nothing_delays_nobody_for_long(host, tmp_path):
    mute = tmp_path / "mute"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(mute))
        listener.listen()
        host.write_ssh_config(agent=mute)
        begin = time.monotonic()
        assert says(host, limits=Limits(0.5, 20)) == "hello\n"
        assert time.monotonic() - begin < 5


def test_the_named_key_comes_before_the_many_of_an_agent(new_host, agent, tmp_path):
    host = new_host(config=("MaxAuthTries 2",)).start()
    for number in range(5):
        agent.add(make_key(tmp_path / f"key{number}"))
    host.write_ssh_config(agent=agent.socket)
    assert says(host) == "hello\n"
    host.write_ssh_config(key=tmp_path / "missing", agent=agent.socket)
    trouble = trouble_of(host)
    assert trouble.kind == "authentication"
    assert "key_file" in trouble.hint
    assert says(host, key_file=str(host.key)) == "hello\n"


def test_a_key_that_is_not_wanted_is_refused_with_what_to_type(host, tmp_path):
    host.write_ssh_config(key=make_key(tmp_path / "stranger"))
    trouble = trouble_of(host)
    assert trouble.kind == "authentication"
    assert f"refuses the key for the login {host.user}" in trouble.sentence
    assert "ssh-copy-id" in trouble.hint


def test_without_any_key_that_is_said(host, tmp_path):
    host.write_ssh_config(key=tmp_path / "missing")
    assert "there is no key to log in with" in trouble_of(host).sentence


def test_a_damaged_key_file_is_named(host, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    host.write_ssh_config(key=broken)
    assert f"{broken} cannot be used" in trouble_of(host).sentence


def test_a_host_that_takes_passwords_only_is_told(new_host):
    host = new_host(config=("PubkeyAuthentication no", "PasswordAuthentication yes")).start()
    # The first value counts in sshd_config.
    config = host.folder / "sshd_config"
    host.process.kill()
    host.process.wait()
    config.write_text("PasswordAuthentication yes\n" + config.read_text())
    host.more_config = ()
    with open(host.folder / "sshd.log", "ab") as log:
        host.process = subprocess.Popen(
            [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", str(config)],
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 20
    trouble = None
    while time.monotonic() < deadline:
        trouble = trouble_of(host)
        if trouble.kind != "refused":
            break
    assert trouble.kind == "authentication"
    assert "only by password" in trouble.sentence


def test_a_login_that_is_unknown_there_is_refused(host):
    assert trouble_of(host, HostAddress("x", "nobody-of-that-name", "127.0.0.1", host.port)).kind == "authentication"


# --- ways there ------------------------------------------------------------------------------------------------------


def test_an_alias_with_its_port_and_login_leads_there(host):
    host.write_ssh_config(f"Host lab-*\n HostName 127.0.0.1\n Port {host.port}\n User nobody-at-all")
    assert says(host, parse_host("lab-one"), default_user=host.user) == "hello\n"


def test_a_jump_host_is_passed_and_its_key_is_checked(new_host):
    gate = new_host("gate").start()
    host = new_host("inner").start()
    config = (
        f"Host inner\n HostName 127.0.0.1\n Port {host.port}\n ProxyJump gate",
        f"Host gate\n HostName 127.0.0.1\n Port {gate.port}\n IdentityFile {gate.key}\n UserKnownHostsFile {gate.known_hosts}",
    )
    host.write_ssh_config(*config)
    assert says(host, parse_host("inner")) == "hello\n"
    assert "Accepted publickey" in gate.log()
    gate.known_hosts.write_text("")
    trouble = trouble_of(host, parse_host("inner"))
    assert trouble.kind == "unknown_key"
    assert "gate" in trouble.sentence


def test_a_jump_host_for_everybody_does_not_jump_over_itself(host):
    host.write_ssh_config(f"Host gate inner\n HostName 127.0.0.1\n Port {host.port}", "Host *\n ProxyJump gate")
    assert says(host, parse_host("gate")) == "hello\n"
    host.write_ssh_config(
        f"Host gate\n HostName localhost\n HostKeyAlias gate\n Port {host.port}",
        f"Host inner\n HostName 127.0.0.1\n Port {host.port}",
        "Host *\n ProxyJump gate",
    )
    host.known_hosts.write_text(host.known_hosts.read_text() + "gate " + host.known_hosts.read_text().split(" ", 1)[1])
    assert says(host, parse_host("inner")) == "hello\n"


def test_jumps_without_end_are_told(host):
    host.write_ssh_config("Host *\n ProxyJump gate-%h")
    trouble = trouble_of(host)
    assert "ProxyJump has no end" in trouble.sentence


def test_what_a_jump_host_cannot_reach_is_told(host):
    port = free_port()
    host.write_ssh_config(
        f"Host inner\n HostName 127.0.0.1\n Port {port}\n ProxyJump gate",
        f"Host gate\n HostName 127.0.0.1\n Port {host.port}",
    )
    trouble = trouble_of(host, parse_host("inner"))
    assert trouble.kind == "no_route"
    assert "the jump host 127.0.0.1 cannot reach it" in trouble.sentence


def test_a_proxy_command_is_the_way_and_leaves_no_process(host, tmp_path):
    need("python3")
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "there = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): there.sendall(data)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := there.recv(65536): os.write(1, data)\n"
    )
    host.write_ssh_config(f"ProxyCommand python3 {relay} %h %p")
    assert says(host) == "hello\n"
    left = subprocess.run(["pgrep", "-f", str(relay)], capture_output=True, text=True, check=False).stdout
    assert left == ""


def test_a_proxy_command_that_fails_is_quoted(host):
    host.write_ssh_config("ProxyCommand echo no way through >&2; exit 7")
    begin = time.monotonic()
    trouble = trouble_of(host)
    assert "no way through" in trouble.sentence
    assert time.monotonic() - begin < 8


# --- hosts that do not answer ----------------------------------------------------------------------------------------


def test_a_closed_port_and_a_name_that_nobody_has_are_told_apart(host):
    refused = trouble_of(host, HostAddress("x", None, "127.0.0.1", free_port()))
    assert refused.kind == "refused"
    unknown = trouble_of(host, parse_host("no-such-host.invalid"), limits=Limits(20, 20))
    assert unknown.kind == "unknown_host"
    assert "no-such-host.invalid" in unknown.sentence


@contextlib.contextmanager
def listener(answer=None):
    """A port that accepts; `answer` is called with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    if answer:
                        answer(kept[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def greet_and_stop(connection):
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def speak_http(connection):
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    connection.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (None, "no_greeting"),
        (speak_http, "no_greeting"),
        (lambda connection: connection.close(), "no_greeting"),
        (greet_and_stop, "timeout"),
    ],
    ids=["mute", "http", "closed at once", "mute after the greeting"],
)
def test_a_port_that_is_no_ssh_is_given_up_within_the_limit(host, answer, kind):
    with listener(answer) as port:
        begin = time.monotonic()
        trouble = trouble_of(host, HostAddress("x", None, "127.0.0.1", port), limits=Limits(0.5, 5))
        assert time.monotonic() - begin < 10
    assert trouble.kind == kind
    assert "127.0.0.1" in trouble.sentence


def test_a_host_that_hangs_after_login_is_given_up_within_the_limit(host):
    host.shell = "/bin/sleep 1000; true"
    host.process.kill()
    host.process.wait()
    host.start()
    begin = time.monotonic()
    trouble = trouble_of(host, limits=Limits(10, 1))
    assert trouble.kind == "hung"
    assert time.monotonic() - begin < 10


def test_an_sshd_that_freezes_after_login_is_given_up_within_the_limit(host):
    with connect(host, limits=Limits(10, 5)) as connection:
        connection.run("true")  # who serves a login changes while it begins
        frozen = descendants(host.process.pid)
        assert frozen
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(HostTrouble) as caught:
            connection.run("echo hello")
        assert caught.value.trouble.kind == "hung"
        assert time.monotonic() - begin < 20
        for pid in frozen:
            # One that was about to end when it was found is gone by now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_connection_that_breaks_in_the_middle_is_told(host):
    with connect(host) as connection:
        children = []

        def cut():
            # Not before the command runs: who serves a login changes while it begins, and how depends on who runs sshd.
            children.extend(descendants(host.process.pid))
            for pid in children:
                # The end of one is the end of the next, where sshd has two processes for a login.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.3, cut)
        timer.start()
        with pytest.raises(HostTrouble) as caught:
            connection.run("sleep 60")
        timer.join()
    assert children
    assert caught.value.trouble.kind == "ssh"


def test_a_command_that_keeps_a_stream_open_does_not_keep_us(host):
    with connect(host) as connection:
        begin = time.monotonic()
        assert connection.run("sleep 7 & echo done").stdout == "done\n"
        assert time.monotonic() - begin < 6


def test_a_flood_is_cut_and_its_end_awaited(host):
    with connect(host) as connection:
        said = connection.run("head -c 5000000 /dev/zero; echo ok >&2; exit 255")
    assert len(said.stdout) == 2**20  # the last of it
    assert (said.stderr, said.exit_code) == ("ok\n", 255)


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_hosts_at_once_each_have_their_own_end(host):
    """Bad ones delay no good one: signal handlers, agents and configurations are shared by all threads."""
    with listener() as mute:
        addresses = [
            *[host.address] * 12,
            *[HostAddress("mute", None, "127.0.0.1", mute)] * 4,
            *[HostAddress("closed", None, "127.0.0.1", free_port())] * 4,
        ]

        def visit(address):
            begin = time.monotonic()
            try:
                with Remote(address, RemoteOptions(ssh_config=host.ssh_config, connect_timeout_seconds=5)) as remote:
                    return (remote.look().host_name, time.monotonic() - begin)
            except HostTrouble as error:
                return (error.trouble.kind, time.monotonic() - begin)

        with ThreadPoolExecutor(len(addresses)) as pool:
            found = list(pool.map(visit, addresses))
    name = socket.gethostname().partition(".")[0]
    assert [kind for kind, _ in found] == [name] * 12 + ["no_greeting"] * 4 + ["refused"] * 4
    assert max(seconds for kind, seconds in found if kind != "no_greeting") < 30


def test_nothing_is_printed_by_the_libraries(host, capfd):
    host.known_hosts.write_text("")
    with pytest.raises(HostTrouble):
        says(host)
    with listener(speak_http) as port, pytest.raises(HostTrouble):
        says(host, HostAddress("x", None, "127.0.0.1", port), limits=Limits(0.5, 5))
    assert capfd.readouterr() == ("", "")
