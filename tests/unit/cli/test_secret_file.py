"""What `kueue secret` makes of a settings file: the two secrets change and nothing else does."""

from __future__ import annotations

import os
import subprocess

import pytest
from peer import answering

from kueue import config, identity, places
from kueue.cli.main import main

pytestmark = pytest.mark.slow

OLD = "the secret that everybody has"

PLAIN = f"""# The file of our lab.
[server_settings]
bind_addresses = "127.0.0.1" # for now

[common_settings]
server_name = "127.0.0.1"
shared_secret = "{OLD}"   # do not tell
server_port = 9
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A function that writes the settings file, with a state directory of its own."""
    path = tmp_path / "config.toml"
    state = tmp_path / "state"
    monkeypatch.setenv("KUEUE_CONFIG", str(path))
    monkeypatch.setenv("KUEUE_STATE_DIR", str(state))

    def write(text, mode=0o600):
        path.write_bytes(text.encode())
        path.chmod(mode)
        return path

    return write


def secrets_in(path):
    common = config.load(str(path)).common
    return common.shared_secret, common.shared_secret_previous


def names(directory):
    return sorted(entry.name for entry in directory.iterdir() if entry.name != "state")


def finish():
    return main(["secret", "finish", "--force"])


def test_rotating_and_finishing_change_one_line_and_keep_the_rest_to_the_byte(lab, capsys):
    path = lab(PLAIN)
    assert main(["secret", "rotate"]) == 0
    new, previous = secrets_in(path)
    assert previous == OLD
    assert len(new) == 64
    assert path.read_text() == PLAIN.replace(
        f'"{OLD}"   # do not tell', f'"{new}"   # do not tell\nshared_secret_previous = "{OLD}"'
    )
    assert finish() == 0
    assert path.read_text() == PLAIN.replace(OLD, new)
    assert names(path.parent) == ["config.toml"]
    out = capsys.readouterr().out
    assert new not in out
    assert OLD not in out


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PLAIN.replace("\n", "\r\n"), id="lines of Windows"),
        pytest.param(PLAIN.replace(f'"{OLD}"   # do not tell', f"'{OLD}'"), id="literal text"),
        pytest.param(f'common_settings.shared_secret = "{OLD}"\n', id="dotted key"),
        pytest.param(f'[ "common_settings" ] # here\n\tshared_secret="{OLD}"', id="odd blanks, no last line end"),
        pytest.param(f'[common_settings]\n"shared_secret" = "{OLD}"\n', id="quoted key"),
        pytest.param(f'[common_settings]\nshared_secret_previous = ""\nshared_secret = "{OLD}"\n', id="empty previous"),
        pytest.param(f'[common_settings]\nshared_secret = "{OLD} \\" \\\\"\n', id="escapes"),
        pytest.param(f'# \u2028shared_secret = "x"\n[common_settings]\nshared_secret = "{OLD}"\n', id="odd line ends"),
        pytest.param(f'\ufeff[common_settings]\nshared_secret = "{OLD}"\n', id="byte order mark"),
        pytest.param(
            f'[common_settings]\nshared_secret = "{OLD}"\n[client_settings]\nx = [\n[{" " * 200_000}1]]\n', id="blanks"
        ),
    ],
)
def test_every_usual_way_to_write_the_secret_is_understood(lab, text):
    path = lab(text)
    old, _ = secrets_in(path)
    assert main(["secret", "rotate"]) == 0
    new, previous = secrets_in(path)
    assert previous == old != new
    assert ("\r\n" in text) == (b"\r\n" in path.read_bytes())
    assert finish() == 0
    assert secrets_in(path) == (new, "")


@pytest.mark.parametrize(
    "text",
    [
        f'common_settings = {{ shared_secret = "{OLD}" }}\n',
        f'[common_settings]\nshared_secret = """{OLD}"""\n',
        f'[common_settings]\nserver_name = """\nshared_secret = "x"\n"""\nshared_secret = "{OLD}"\n',
        f'[common_settings]\nunknown = """\nshared_secret = "x"\n"""\nshared_secret = "{OLD}"\n',
    ],
)
def test_what_cannot_be_changed_with_certainty_is_left_alone(lab, text, capsys):
    path = lab(text)
    before = path.read_bytes()
    assert main(["secret", "rotate"]) == 1
    assert path.read_bytes() == before
    assert names(path.parent) == ["config.toml"]
    error = capsys.readouterr().err
    assert "Error: " in error
    assert OLD not in error


def test_a_secret_of_another_table_stays_as_it_is(lab):
    more = '[[of_our_scripts]]\nshared_secret = "theirs"\n'
    path = lab(PLAIN + more)
    assert main(["secret", "rotate"]) == 0
    assert path.read_text().endswith(more)


def test_a_draft_of_a_command_that_was_killed_is_swept_up_for_a_secret_stands_in_it(lab):
    path = lab(PLAIN)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (path.parent / f".config.toml.{pid}").write_text("the secret of a rotation that never was")
    alive = path.parent / f".config.toml.{os.getppid()}"
    alive.write_text("of one that still writes")
    assert main(["secret", "rotate"]) == 0
    assert names(path.parent) == [alive.name, "config.toml"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the file of another user")
def test_root_does_not_take_a_user_s_file_away(lab):
    path = lab(PLAIN)
    os.chown(path, 54321, 54322)
    assert main(["secret", "rotate"]) == 0
    assert (path.stat().st_uid, path.stat().st_gid) == (54321, 54322)
    assert secrets_in(path)[1] == OLD


def test_another_name_of_the_file_which_keeps_the_old_secret_is_told_of(lab, tmp_path, capsys):
    path = lab(PLAIN)
    os.link(path, tmp_path / "other")
    assert main(["secret", "rotate"]) == 0
    assert "1 more name (hard links)" in capsys.readouterr().err
    assert (tmp_path / "other").read_text() == PLAIN


def test_a_second_rotation_is_refused_and_so_is_finishing_none(lab, capsys):
    path = lab(PLAIN)
    assert finish() == 1
    assert "No rotation is under way" in capsys.readouterr().err
    assert main(["secret", "rotate"]) == 0
    before = path.read_bytes()
    assert main(["secret", "rotate"]) == 1
    assert "A rotation is under way" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_link_is_followed_and_the_mode_is_kept(lab, tmp_path):
    path = lab(PLAIN)
    real = tmp_path / "dotfiles" / "kueue.toml"
    real.parent.mkdir()
    path.rename(real)
    path.symlink_to(real)
    real.chmod(0o400)
    assert main(["secret", "rotate"]) == 0
    assert path.is_symlink()
    assert secrets_in(real)[1] == OLD
    assert real.stat().st_mode & 0o777 == 0o400


def test_finishing_without_a_server_to_ask_is_refused_unless_forced(lab, capsys):
    path = lab(PLAIN)
    assert main(["secret", "rotate"]) == 0
    assert main(["--patience", "0", "secret", "finish"]) == 1
    assert "is not reached" in capsys.readouterr().err
    assert secrets_in(path)[1] == OLD


def test_reload_says_when_nothing_runs_here(lab, capsys):
    lab(PLAIN)
    assert main(["secret", "reload"]) == 1
    assert "Neither a server nor a worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({}, "too old to say"),
        ({"secrets": ["old"]}, "does not have the new secret"),
        ({"secrets": ["old", "NEW"]}, "still has another secret"),
        ({"secrets": ["NEW", "old"], "old_secret_workers": ["w1", "w7"]}, "Connected with the old secret: w1, w7"),
        ({"secrets": ["NEW", "old"]}, ""),
    ],
)
def test_the_old_secret_stays_as_long_as_somebody_needs_it(lab, run, peers, info, sentence, capsys):
    path = lab(PLAIN)
    assert main(["secret", "rotate"]) == 0
    present = identity.identity_of(secrets_in(path)[0], places.find().cache).fingerprint
    answer = {
        "type": "Info", "version": "1", "protocol": 1, "queue_id": "q", "pid": 1, "started_wall": 1.0, **info,
        "secrets": [present if one == "NEW" else one for one in info.get("secrets", ())],
    }  # fmt: skip
    peer = peers(answering({"ServerInfo": answer}))
    settings = config.load(str(path), ("client_settings",))
    done = run(peer, "secret", "status", config=settings)
    assert sentence in done.out
    assert ("Everybody has the new secret" in done.out) == (not sentence)
