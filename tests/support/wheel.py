"""A wheel of this checkout, and an environment that it is installed into."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("kueue", "ops", "completions", "systemd-user")


def build(folder: Path, version: str = "") -> Path:
    """The wheel, built in `folder` from a copy of the source; of another `version` if one is named."""
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    if version:
        package = source / "kueue" / "__init__.py"
        text, count = re.subn(r'__version__ = ".*"', f'__version__ = "{version}"', package.read_text())
        assert count == 1
        package.write_text(text)
    # With the build tool at hand nothing is downloaded.
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *here, "-w", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def commands(wheel: str, venv: str) -> list[list[str]]:
    """What makes an environment at `venv` with the wheel in it, and what kueue depends on taken from the running one."""
    link = (
        "import glob, sys; (place,) = glob.glob(sys.argv[1] + '/lib/python*/site-packages'); "
        "open(place + '/dependencies.pth', 'w').write(sys.argv[2] + '\\n')"
    )
    pip = ["-m", "pip", "--python", f"{venv}/bin/python", "--disable-pip-version-check"]
    return [
        [sys.executable, "-m", "venv", "--without-pip", venv],
        [sys.executable, "-c", link, venv, sysconfig.get_path("purelib")],
        [sys.executable, *pip, "install", "-q", "--no-deps", "--no-index", wheel],
    ]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
