"""`kueue_install`, run as a program in a home of its own: files appear, are renewed and go; what a person changed stays."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kueue.cli.programs import PROGRAMS
from kueue_ops import assets, record
from kueue_ops.completion_places import SHELLS
from kueue_ops.user_services import BOOTED

ROOT = Path(__file__).parents[3]


class Home:
    def __init__(self, path):
        self.path = path

    def install(self, *words, **environ):
        """The finished program."""
        known = {"HOME": str(self.path), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        known["PYTHONPATH"] = f"{ROOT}:{ROOT / 'ops'}"
        known["TEST_SESSION_OF_KUEUE"] = os.environ["TEST_SESSION_OF_KUEUE"]
        command = [sys.executable, "-m", "kueue_ops.install", *map(str, words)]
        return subprocess.run(
            command,
            env={**known, **environ},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
            cwd="/",
        )

    def files(self):
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())


RECORD = ".config/kueue/installed.sha256"
BASH = ".local/share/bash-completion/completions/kueue"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


def test_help_has_an_example_and_wrong_words_are_usage(home):
    for kind in ("systemd", "completion", "grafana", "prometheus"):
        assert f"Example: kueue_install {kind}" in home.install(kind, "--help").stdout
        assert "--dry-run" in home.install(kind, "--help").stdout
    for words in ([], ["else"], ["completion", "cmd.exe"], ["systemd", "client"], ["grafana"]):
        done = home.install(*words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert home.files() == []


def test_an_interrupt_ends_it_by_the_signal_so_that_a_loop_around_it_ends(home):
    with record.opened(home.path / RECORD):  # it waits for whoever else installs
        environ = {**os.environ, "HOME": str(home.path), "PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}"}
        with subprocess.Popen(
            [sys.executable, "-m", "kueue_ops.install", "completion", "bash"], env=environ
        ) as process:
            place = (home.path / RECORD).parent
            while not _has_open(process.pid, place):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT


def _has_open(pid, place):
    return any(os.path.realpath(link) == str(place) for link in Path(f"/proc/{pid}/fd").iterdir())


def test_without_systemd_it_says_what_to_do_instead(home):
    if BOOTED.exists():
        pytest.skip("this machine runs systemd")
    for words in ([], ["--dry-run"], ["--uninstall"], ["server", "--start"]):
        done = home.install("systemd", *words)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: This machine does not run systemd")
        assert "screen -dmS kueue_worker kueue_worker" in done.stderr
    assert set(home.files()) <= {RECORD}


def test_a_dry_run_says_every_step_and_takes_none(home):
    done = home.install("completion", "bash", "--dry-run")
    assert done.returncode == 0
    assert f"would write {home.path / BASH} (new)" in done.stdout
    assert list(home.path.iterdir()) == []
    home.install("completion", "bash")
    before = home.files()
    done = home.install("completion", "--uninstall", "--dry-run")
    assert f"would remove {home.path / BASH}\n" in done.stdout
    assert home.files() == before


def test_each_shell_gets_its_file_where_it_looks_and_the_rest_is_said(home):
    done = home.install("completion", *SHELLS)
    assert done.returncode == 0, done.stderr
    assert home.files() == sorted(
        [
            RECORD,
            BASH,
            *(f".local/share/bash-completion/completions/{name}" for name in PROGRAMS),
            ".local/share/zsh/site-functions/_kueue",
            *(f".config/fish/completions/{name}.fish" for name in ("kueue", *PROGRAMS)),
            ".local/share/kueue-completion/kueue.tcsh",
            ".local/share/kueue-completion/kueue.ps1",
            ".config/elvish/lib/kueue.elv",
        ]
    )
    folder = home.path / ".local/share/zsh/site-functions"
    assert f"zsh: write into ~/.zshrc: fpath=({folder} $fpath)" in done.stdout
    assert (home.path / BASH).read_bytes() == (assets.folder("completions") / "kueue.bash").read_bytes()
    # What stands there already is not asked for again.
    (home.path / ".zshrc").write_text(f"fpath=({folder} $fpath)\n")
    assert "fpath" not in home.install("completion", "zsh").stdout
    # Without names all goes that came.
    assert home.install("completion", "--uninstall").returncode == 0
    assert home.files() == [".zshrc"]


def test_the_folders_of_the_xdg_variables_count(home):
    home.install("completion", "bash", "fish", XDG_DATA_HOME=f"{home.path}/d", XDG_CONFIG_HOME=f"{home.path}/c")
    assert {"d/bash-completion/completions/kueue", "c/fish/completions/kueue.fish", "c/kueue/installed.sha256"} <= set(
        home.files()
    )


def test_without_a_name_the_login_shell_is_meant(home):
    name = Path(pwd.getpwuid(os.getuid()).pw_shell).name
    done = home.install("completion")
    if name in SHELLS:
        assert done.returncode == 0
        assert f"/{Path(SHELLS[name].target).name} (new)" in done.stdout
    else:
        assert (done.returncode, "Name another" in done.stderr) == (1, True)


BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"
QUESTIONS = {
    "bash": f". {BASH_COMPLETION}; for name in kueue kueue_worker; do {{ _comp_load $name || __load_completion $name || "
    "_completion_loader $name; } 2>/dev/null; complete -p $name; done",
    "fish": 'for name in kueue kueue_worker; complete -C "$name -" >/dev/null; end; complete',
    "zsh": "fpath=(~/.local/share/zsh/site-functions $fpath); autoload -Uz compinit; compinit -u -D; "
    "print $_comps[kueue] for kueue; print $_comps[kueue_worker] for kueue_worker",
}


@pytest.mark.parametrize("shell", QUESTIONS)
def test_a_real_shell_finds_it_in_its_place(home, shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} on this machine")
    if shell == "bash" and not Path(BASH_COMPLETION).exists():
        pytest.skip("no bash-completion on this machine")
    home.install("completion", shell)
    quiet = {"bash": ["--norc"], "fish": [], "zsh": ["-f"]}[shell]
    # fish looks for completions of programs alone that there are.
    programs = home.path / "bin"
    programs.mkdir()
    for name in ("kueue", "kueue_worker"):
        shutil.copy("/bin/true", programs / name)
    environ = {"HOME": str(home.path), "PATH": f"{programs}:{os.environ['PATH']}"}
    told = subprocess.run(
        [shell, *quiet, "-c", QUESTIONS[shell]], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    for name in ("kueue", "kueue_worker"):
        assert re.search(rf"_kueue.*\b{name}\b|\b{name}\b.*_kueue", told.stdout), told.stdout + told.stderr


def test_what_somebody_changed_is_neither_overwritten_nor_removed_unless_forced(home):
    file = home.path / BASH
    home.install("completion", "bash")
    ours = file.read_text()
    file.write_text(f"{ours}# mine\n")
    for words in ([], ["--uninstall"]):
        done = home.install("completion", "bash", *words)
        assert done.returncode == 1
        assert f"Kept {file}: it was changed by somebody" in done.stderr
        assert file.read_text() == f"{ours}# mine\n"
    done = home.install("completion", "bash", "--force")
    assert f"wrote {file} (in the place of a changed one)" in done.stdout
    assert file.read_text() == ours
    assert home.install("completion", "bash", "--uninstall").returncode == 0
    assert home.files() == []


def test_a_file_or_link_that_was_there_before_is_left_alone(home):
    file = home.path / BASH
    file.parent.mkdir(parents=True)
    file.write_text("somebody's own\n")
    assert home.install("completion", "bash").returncode == 1
    assert file.read_text() == "somebody's own\n"
    file.unlink()
    file.symlink_to("/dev/null")
    assert home.install("completion", "bash").returncode == 1
    assert os.readlink(file) == "/dev/null"


def test_a_file_of_an_older_version_is_renewed(home):
    file = home.path / BASH
    home.install("completion", "bash")
    file.write_text("as an older version wrote it\n")
    with record.opened(home.path / RECORD) as known:
        known.note("completion", file, "as an older version wrote it\n")
    assert f"wrote {file} (renewed)" in home.install("completion", "bash").stdout
    assert f"unchanged {file}" in home.install("completion", "bash").stdout


def test_the_record_can_be_checked_by_sha256sum(home):
    home.install("completion", "bash", "fish")
    home.install("grafana", home.path / "g")
    check = ["sha256sum", "--check", "--quiet", str(home.path / RECORD)]
    assert subprocess.run(check, check=False, capture_output=True).returncode == 0
    assert (home.path / RECORD).stat().st_mode & 0o777 == 0o600
    (home.path / BASH).write_text("changed\n")
    told = subprocess.run(check, check=False, capture_output=True, text=True)
    assert f"{home.path / BASH}: FAILED" in told.stdout


def test_a_folder_with_any_name_is_remembered_so_that_sha256sum_understands_it(home):
    folder = home.path / os.fsdecode(b"a\nb\\c\xe2\x80\xa8d\xff")
    home.install("grafana", folder)
    check = ["sha256sum", "--check", "--quiet", str(home.path / RECORD)]
    assert subprocess.run(check, check=False, capture_output=True).returncode == 0
    assert home.install("grafana", folder, "--uninstall").returncode == 0
    assert home.files() == []


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(home):
    file = home.path / BASH
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    done = home.install("completion", "bash")
    assert done.returncode == 1
    assert f"Kept {file}" in done.stderr
    (home.path / RECORD).unlink(missing_ok=True)
    os.mkfifo(home.path / RECORD)
    done = home.install("completion", "fish")
    assert done.returncode == 1
    assert f"{home.path / RECORD} is not a file" in done.stderr


def test_nothing_is_said_to_be_written_that_is_not(home):
    folder = home.path / "p"
    folder.mkdir()
    (folder / "kueue.scrape.yml").mkdir()
    done = home.install("prometheus", folder, "--force")
    assert done.returncode == 1
    assert "kueue.scrape.yml" in done.stderr
    assert "kueue.scrape.yml" not in done.stdout
    written = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert all(Path(name).is_file() for name in written)


def test_a_home_without_a_place_is_refused(home, tmp_path):
    done = home.install("completion", "bash", HOME="relative")
    assert (done.returncode, done.stdout) == (1, "")
    assert "HOME is 'relative', which is no absolute path" in done.stderr


def test_two_at_once_forget_nothing(home):
    threads = [threading.Thread(target=home.install, args=("completion", shell)) for shell in ("bash", "zsh", "fish")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (home.path / RECORD).read_text()
    assert all(name in text for name in ("/kueue\n", "/_kueue\n", "/kueue.fish\n"))


def test_dashboards_come_with_what_grafana_needs_to_find_them(home):
    folder = home.path / "for grafana"
    done = home.install("grafana", folder, "--prometheus-url", "http://prometheus:9090")
    assert done.returncode == 0, done.stderr
    shipped = [path for path in assets.folder("grafana").rglob("*.json") if "test" not in path.name]
    assert sorted(path.name for path in (folder / "dashboards").rglob("*.json")) == sorted(
        path.name for path in shipped
    )
    provider = (folder / "provisioning/dashboards/kueue.yaml").read_text()
    assert f"path: {json.dumps(str(folder / 'dashboards'))}" in provider
    assert 'url: "http://prometheus:9090"' in (folder / "provisioning/datasources/kueue.yaml").read_text()
    assert f"sudo cp {folder}/provisioning/dashboards/kueue.yaml /etc/grafana/provisioning/dashboards/" in done.stdout
    (folder / "mine.txt").write_text("kept")
    assert home.install("grafana", folder, "--uninstall").returncode == 0
    assert home.files() == ["for grafana/mine.txt"]
    assert "Nothing" in home.install("grafana", folder, "--uninstall").stderr


def test_prometheus_gets_scrapes_and_rules_and_the_lines_to_write(home):
    folder = home.path / "p"
    done = home.install("prometheus", folder)
    assert done.returncode == 0, done.stderr
    shipped = [path for path in assets.folder("prometheus").rglob("*.y*ml") if "test" not in str(path.name)]
    assert len([path for path in folder.rglob("*") if path.is_file()]) == len(shipped)
    for path in shipped:
        assert str(folder / path.relative_to(assets.folder("prometheus"))) in done.stdout
    assert home.install("prometheus", folder, "--uninstall").returncode == 0
    assert home.files() == []


def test_a_folder_that_cannot_be_written_is_one_sentence(home):
    (home.path / "file").write_text("no folder")
    done = home.install("grafana", home.path / "file")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
