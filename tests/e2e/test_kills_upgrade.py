"""The upgrade: stop, install the new version over the old one, start. Running jobs and their runner notice nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.kill_lab import KillLab, lives

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """An older and a newer wheel of this very source."""
    folder = tmp_path_factory.mktemp("wheels")
    return [wheel(folder, version) for version in ("7.0.1", "7.0.2")]


def wheel(folder: Path, version: str) -> Path:
    source = folder / version
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kueue", "ops", "completions", "systemd-user"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    package = source / "kueue" / "__init__.py"
    text, count = re.subn(r'__version__ = ".*"', f'__version__ = "{version}"', package.read_text())
    assert count == 1
    package.write_text(text)
    # With the build tool at hand nothing is downloaded.
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *here, "-w", str(folder), str(source))
    (built,) = folder.glob(f"*-{version}-*.whl")
    return built


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


class Installed(KillLab):
    """A laboratory whose programs run from an environment of their own."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        run(sys.executable, "-m", "venv", "--without-pip", str(self.venv))
        super().__init__(folder, python=str(self.venv / "bin" / "python"))
        (packages,) = self.venv.glob("lib/python*/site-packages")
        # What kueue depends on is there already; kueue itself comes from the wheel, which is looked at first.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def environment(self, **extra: str) -> dict[str, str]:
        found = super().environment(**extra)
        del found["PYTHONPATH"]
        return found

    def install(self, wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        run(*pip, "install", "-q", "--no-deps", "--no-index", str(wheel))
        assert self.kueue("--version").stdout.split()[-1] == wheel.name.split("-")[1]

    def versions(self) -> dict[str, str]:
        return {name: row["info"].get("version", row.get("version", "")) for name, row in self.machines().items()}


@pytest.fixture
def lab(tmp_path):
    with Installed(tmp_path) as lab:
        yield lab


def test_an_upgrade_of_server_then_worker_disturbs_no_job_and_no_runner(lab, wheels):
    older, newer = wheels
    lab.install(older)
    lab.start_server()
    worker = lab.start_worker("w1", worker_max_parallel_jobs=4)
    script = "echo $KUEUE_JOB_ID $$ >> begun; echo before; while [ ! -e go ]; do sleep 0.1; done; echo after; exit 23"
    jobs = [lab.shell(script) for _ in range(3)]
    lab.until(lambda: len(lab.lines("begun")) == 3, "three run")
    waiting = lab.shell("kueue=here; echo $kueue >> waited", cores=64, held=True)
    begun = dict(map(int, line.split()) for line in lab.lines("begun"))
    pids = [begun[job] for job in jobs]
    guards = sorted(lab.runners())
    assert len(guards) == 2

    # The server first, as the procedure says; the worker of the old version serves on meanwhile.
    assert lab.stop_server() == 0
    lab.install(newer)
    lab.start_server()
    lab.until_online()
    assert lab.ask("ServerInfo")["version"] == "7.0.2"
    assert sorted(row["id"] for row in lab.rows("running")) == jobs
    assert lab.state(waiting) == "held"
    assert lab.end_of(lab.shell("exit 0"))["state"] == "succeeded"

    # Then the worker.
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    lab.start_worker("w1", worker_max_parallel_jobs=4)
    assert all(lives(pid) for pid in pids)
    assert set(guards) <= set(lab.runners()), "the runner of the old version was not disturbed"
    lab.end_of(lab.shell("echo new"))
    assert len(lab.runners()) == 4, "new jobs belong to a runner of the new version"
    names = sorted(path.name for path in (lab.worker_state() / "runners").iterdir())
    assert [name.partition("+")[0] for name in names] == ["7.0.1", "7.0.2"]
    # Stopping an attempt of the old runner works from the new worker.
    assert lab.kueue("remove-job", "--kill", str(jobs[2])).returncode == 0
    lab.until(lambda: not lives(pids[2]), "it is stopped")

    (lab.folder / "go").touch()
    for job in jobs[:2]:
        assert lab.end_of(job, "failed")["return_code"] == 23
        assert lab.output(job) == "before\nafter\n"
        assert lab.numbers(job) == [1]
    assert len(lab.lines("begun")) == 3
    lab.until(
        lambda: not set(guards) & set(lab.runners()), "the old runner leaves when it has nothing to keep", seconds=40
    )
    lab.no_traceback()


def test_an_old_runner_survives_the_removal_of_its_package(lab, wheels):
    """The whole package is gone from the disk while a job runs; keeper and spawner die one after the other."""
    older, newer = wheels
    lab.install(older)
    lab.start_server()
    worker = lab.start_worker("w1")
    job = lab.shell("echo $$ >> begun; while [ ! -e go ]; do sleep 0.1; done; exit 9")
    lab.until(lambda: lab.lines("begun"), "it runs")
    worker.send_signal(signal.SIGTERM)
    worker.wait(10)
    lab.stop_server()
    (package,) = lab.venv.glob("lib/python*/site-packages/kueue")
    shutil.rmtree(package)
    for file in lab.worker_state().glob("runner-*.pyz"):
        file.unlink()
    (keeper,) = lab.runner_processes("keeper")
    (spawner,) = lab.runner_processes("spawner")
    os.kill(keeper, signal.SIGKILL)
    lab.until(lambda: lab.runner_processes("keeper") == [spawner], "the spawner takes over")
    lab.until(lambda: lab.runner_processes("spawner"), "and makes another")
    lab.install(newer)
    lab.start_server()
    lab.start_worker("w1")
    (lab.folder / "go").touch()
    assert lab.end_of(job, "failed")["return_code"] == 9
    assert lab.numbers(job) == [1]
