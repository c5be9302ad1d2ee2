"""What is written for systemd: the units as they come with kueue, made true for one installation.

Rules
- Pure: texts and facts of the machine come in by parameter.
- Homes are shared between hosts, and with them units and what is enabled. So a unit has a drop-in for each host it was
  installed for, ``UNIT.d/host-NAME.conf`` with ``ConditionHost=|NAME`` (systemd.unit(5): of several such lines one must
  hold). Adding or removing a host touches the file of that host alone. Server and restart manager have one host.
- The units hold only what systemd 239 knows or passes over with a line in its log; what is newer and worth having is
  added where it is known.
"""

from __future__ import annotations

import re

import msgspec

from kueue.errors import KueueError

BACK_OFF_SINCE = 254
"""Version of systemd from which pauses between restarts can grow (systemd.service(5), ``RestartSteps=``)."""
BACK_OFF = {"RestartSteps": "6", "RestartMaxDelaySec": "2min"}


class Part(msgspec.Struct, frozen=True):
    """One program that runs as a service."""

    name: str
    """As on the command line: ``server``."""
    unit: str
    program: str
    module: str
    one_host: bool
    """Runs on one host of those that share the home."""


PARTS = {
    part.name: part
    for part in (
        Part("server", "kueue-server.service", "kueue_server", "kueue.server.main", one_host=True),
        Part("worker", "kueue-worker.service", "kueue_worker", "kueue.worker.main", one_host=False),
        Part(
            "restart-workers",
            "kueue-restart-workers.service",
            "kueue_restart_workers",
            "kueue_ops.restart_workers",
            one_host=True,
        ),
    )
}


class Command(msgspec.Struct, frozen=True):
    """How a program of this installation is started."""

    words: tuple[str, ...]
    """The first is an absolute path."""
    directory: str = ""
    """Where it must be started; empty: anywhere."""
    python_path: str = ""
    """Only for programs that start no jobs, which would inherit it."""


def unit(text: str, command: Command, config: str = "", version: int = 0) -> str:
    """A unit for this installation. `text`: as it comes with kueue; `config`: path of the settings, empty: the usual
    one; `version`: of the systemd that will read it, 0: not known.

    Raises `KueueError` when a path cannot be written into a unit.
    """
    if re.search(r"[\"'\\]", command.words[0]):
        # systemd refuses the whole unit: "Executable name contains special characters".
        raise KueueError(
            f"The path {command.words[0]} cannot be written into a unit of systemd.",
            hint="Install kueue at a place without quotes and backslashes in its name.",
        )
    words = [*command.words, *(("--config", config) if config else ())]
    start = [f"ExecStart={' '.join([_quoted(words[0], is_program=True), *map(_quoted, words[1:])])}"]
    if command.directory:
        start.append(f"WorkingDirectory={_percent(command.directory)}")
    if command.python_path:
        start.append(f"Environment={_quoted(f'PYTHONPATH={command.python_path}', is_program=True)}")
    text = _replaced(text, "ExecStart", "\n".join(start))
    if config and "\nConditionPathExists=" in text:
        text = _replaced(text, "ConditionPathExists", f"ConditionPathExists={_percent(config)}")
    if version >= BACK_OFF_SINCE:
        (pause,) = re.findall(r"^RestartSec=.*$", text, re.MULTILINE)
        text = _replaced(text, "RestartSec", "\n".join([pause, *(f"{key}={value}" for key, value in BACK_OFF.items())]))
    return text


def started(text: str) -> str:
    """The program that a unit starts, unescaped; empty if it names none."""
    line = next((line for line in text.splitlines() if line.startswith("ExecStart=")), "")
    found = re.match(r'ExecStart="((?:[^"\\]|\\.)*)"|ExecStart=(\S+)', line)
    if found is None:
        return ""
    return re.sub(r"\\(.)", r"\1", found[1] or found[2] or "").replace("%%", "%")


def host_file(name: str) -> str:
    """File name of the drop-in for a host."""
    return f"host-{name}.conf"


def host_of(file: str) -> str:
    """The host of a drop-in's file name; empty: it is none of ours."""
    found = re.fullmatch(r"host-(.+)\.conf", file)
    return found[1] if found else ""


def host(name: str) -> str:
    """The drop-in that lets a unit start on this host (``uname -n``). Raises `KueueError` for a name that cannot be."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise KueueError(f"This machine's host name '{name}' cannot be written into a unit.", hint="hostnamectl")
    return (
        f"# Made by `kueue_install systemd` on {name}. Homes may be shared: the unit starts on hosts that have such a\n"
        f"# file, and on no others.\n\n[Unit]\nConditionHost=|{name}\n"
    )


def _replaced(text: str, key: str, line: str) -> str:
    changed, count = re.subn(rf"^{key}=.*$", lambda _: line, text, flags=re.MULTILINE)
    assert count == 1, f"one {key} in a unit that comes with kueue"
    return changed


def _percent(path: str) -> str:
    """A path alone on its line: only specifiers are looked for in it."""
    is_text = path.encode("utf-8", "replace").decode("utf-8") == path  # systemd passes over lines that are not UTF-8
    if not is_text or any(character < " " for character in path) or path != path.strip() or path.endswith("\\"):
        raise KueueError(f"The path {path!r} cannot be written into a unit of systemd.", hint="Take another path.")
    return path.replace("%", "%%")


def _quoted(word: str, *, is_program: bool = False) -> str:
    """A word of a command line (systemd.service(5)). Variables are put into arguments only, not into the program."""
    text = _percent(word)
    if not is_program:
        text = text.replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./$-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
