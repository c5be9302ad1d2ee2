"""The wheel has all that `kueue_install` gives out, and each way of installing finds the programs it came with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kueue_ops import assets, installation
from kueue_ops.systemd import PARTS
from tests.support import wheel

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_is_given_out(built):
    names = set(zipfile.ZipFile(built).namelist())
    for kind in assets.FOLDERS:
        source = assets.folder(kind)
        files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        missing = [path for path in files if f"kueue_ops/assets/{kind}/{path.relative_to(source)}" not in names]
        assert not missing
    units = {f"kueue_ops/assets/systemd-user/{part.unit}" for part in PARTS.values()}
    assert units <= names


@pytest.mark.slow
def test_from_a_wheel_in_a_venv_and_through_a_link_as_pipx_makes_it(built, tmp_path):
    venv = tmp_path / "a venv"
    for command in wheel.commands(str(built), str(venv)):
        wheel.run(*command)
    home = tmp_path / "home"
    (home / ".local/bin").mkdir(parents=True)
    for name in ("kueue_install", *(part.program for part in PARTS.values())):
        (home / ".local/bin" / name).symlink_to(venv / "bin" / name)
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [home / ".local/bin/kueue_install", "completion", "fish"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (home / ".config/fish/completions/kueue.fish").exists()
    where = "from kueue_ops import installation, systemd; print(*installation.command(systemd.PARTS['worker']).words, sep='\\n')"
    # The interpreter of the environment finds what lies beside it; a link is kept as it was called.
    for start, expected in (
        ([venv / "bin/python", "-c", where], venv / "bin/kueue_worker"),
        (
            [venv / "bin/python", "-c", f"import sys; sys.argv[0] = '{home}/.local/bin/kueue_install'; {where}"],
            home / ".local/bin/kueue_worker",
        ),
    ):
        told = subprocess.run(start, env=environ, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        assert told.splitlines() == [str(expected)]


def test_a_checkout_that_nobody_installed_starts_from_its_folder(tmp_path):
    """Run by an interpreter that has the dependencies, but no program of kueue beside it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    base = Path(sys.executable)
    python.symlink_to(base if sys.prefix == sys.base_prefix else os.path.realpath(base))
    text = (
        "import sys; from kueue_ops import installation, systemd\n"
        "for part in systemd.PARTS.values():\n"
        "    found = installation.command(part); print(found.words[1:], found.directory, found.python_path)\n"
    )
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'ops'}:{sysconfig.get_path('purelib')}"
    code = f"import sysconfig; sysconfig.get_path = lambda *_: {str(tmp_path)!r}\n{text}"
    told = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, check=False, cwd="/")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [
        f"('-m', 'kueue.server.main') {ROOT} ",
        f"('-m', 'kueue.worker.main') {ROOT} ",
        f"('-m', 'kueue_ops.restart_workers') {ROOT} {ROOT / 'ops'}",
    ]


def test_the_program_beside_the_running_one_is_taken(tmp_path, monkeypatch):
    for name in ("kueue_install", "kueue_worker"):
        shutil.copy("/bin/true", tmp_path / name)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kueue_install")])
    assert installation.command(PARTS["worker"]).words == (str(tmp_path / "kueue_worker"),)
