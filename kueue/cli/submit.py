"""``kueue cmd``: from a command line to jobs, checked before anything is sent."""
# pathlib is left out for the command's start-up time (5 ms):
# ruff: noqa: PTH109, PTH116, PTH117, PTH121, PTH123

from __future__ import annotations

import argparse
import os
import stat
import sys

from kueue.cli.session import Session
from kueue.cli.text import harmless, width
from kueue.cli.waiting import wait_for
from kueue.config import Config
from kueue.errors import KueueError, UsageError, UserError
from kueue.units import format_id_ranges, os_to_wire, parse_resources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    WireText: TypeAlias = str | dict[str, str]

TRAVELS = ("PATH", "HOME", "LANG", "VIRTUAL_ENV")
"""Variables of the submitter that the job gets; all that begin with ``LC_`` join them."""

DISCARD = "null"
_NAME_CHARACTERS = 200
# One argument may have 32 pages with its closing zero: MAX_ARG_STRLEN of execve(2).
_ARGUMENT_BYTES = 32 * 4096 - 1
# Arguments and environment together must leave room for what the worker adds.
_ENVIRONMENT_RESERVE_BYTES = 64 * 1024


def cmd(session: Session) -> int:
    """Submits the job (or one for each line) and prints the id, or waits and prints the return code."""
    arguments = session.arguments
    if not arguments.command and arguments.each_line is None:
        # The help belongs to results only when it was asked for.
        raise UsageError(
            "a command is needed, for example: kueue cmd ./my_script.py", hint="`kueue cmd --help` explains."
        )
    if session.screen.is_closed:
        raise KueueError(
            "No job was made: stdout is closed, so that its id could not be printed.", hint="Redirect it to /dev/null."
        )
    template = job_range(arguments, session.config, os.environ)
    if arguments.each_line is None:
        check_command(arguments.command, "The command")
        template["payload"]["argv"] = [text(word) for word in arguments.command]
        ranges = [template]
    else:
        ranges = ranges_of_lines(arguments, template, _lines(arguments.each_line))
    try:
        answer = session.client.submit(ranges, refuse_impossible=arguments.refuse_impossible)
    except UserError as error:
        prefix = "Job rejected by server: "
        sentence = str(error)
        raise UserError(
            sentence if sentence.startswith(prefix) else prefix + sentence, hint=error.hint, exit_code=error.exit_code
        ) from error
    except KeyboardInterrupt:
        session.screen.remark("Interrupted before the server answered: `kueue list-jobs` shows whether there is a job.")
        raise
    if not arguments.quiet:
        for sentence in answer.get("remarks", ()):
            session.screen.remark(sentence)
    ids = [(first, last) for first, last in answer["ids"]]
    try:
        if arguments.wait:
            return wait_for(session, ids, prints_codes=True)
        for first, last in ids:
            for job in range(first, last + 1):
                session.screen.print(str(job))
        session.screen.flush()
    except (KueueError, BrokenPipeError) as error:
        # Whoever takes it for a failed submission would run the work twice.
        what = "its reader has left" if isinstance(error, BrokenPipeError) else "then something went wrong"
        session.screen.remark(f"Submitted as {format_id_ranges(ids)}, but {what}.")
        raise
    return 0


def job_range(arguments: argparse.Namespace, config: Config, environ: Mapping[str, str]) -> dict[str, Any]:
    """A `model.JobRange` as it travels, all but the command. Raises `UserError` when an option makes no sense."""
    settings = config.client
    cpus, ram_mb = arguments.cpus, arguments.ram_mb
    payload: dict[str, Any] = {"argv": []}
    if arguments.name is not None:
        payload["name"] = text(_checked_name(arguments.name))
    for stream in ("stdout", "stderr"):
        path = getattr(arguments, stream)
        if path is not None:
            payload[stream] = text(_output_path(path, stream))
    request: dict[str, Any] = {
        "slots": arguments.job_slots,
        "cores": settings.job_default_cpus if cpus is None else cpus,
        "ram_mb": settings.job_default_ram_mb if ram_mb is None else ram_mb,
        "cores_are_wish": cpus is None,
        "ram_is_wish": ram_mb is None,
        "counters": [list(pair) for pair in parse_resources(arguments.resource)],
    }
    if arguments.gpus:
        request["named"] = [["gpu", arguments.gpus]]
    return {
        "payload": payload,
        "place": place(arguments.env, environ),
        "request": request,
        "terms": {
            "timeout_seconds": arguments.timeout,
            "max_attempts": arguments.max_attempts,
            "on_lost": arguments.on_lost or settings.on_lost,
            "keep_background": arguments.keep_background,
        },
        "held": arguments.hold,
    }


def place(options: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """A `model.Place` as it travels: the directory, the variables and the umask of this process.

    `options`: ``NAME=VALUE`` or ``NAME``, which copies the value of ours.
    """
    try:
        cwd = os.getcwd()
    except OSError as error:
        raise UserError(
            f"The current directory cannot be found: {error.strerror}.", hint="Go to a directory that exists."
        ) from error
    written = environ.get("PWD", "")
    is_same = written != cwd and os.path.isabs(written) and _is_same_directory(written, cwd)
    chosen = {name: value for name, value in environ.items() if name in TRAVELS or name.startswith("LC_")}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or "\0" in option:
            raise UserError(f"Not a variable: --env '{option}'.", hint="Write --env NAME=VALUE or --env NAME.")
        if not equals and name not in environ:
            raise UserError(f"The variable {name} is not set here.", hint=f"Write --env {name}=VALUE.")
        chosen[name] = value if equals else environ[name]
    size = sum(len(os.fsencode(name)) + len(os.fsencode(value)) + 10 for name, value in chosen.items())
    if size > _total_limit() // 2:
        raise UserError(f"The variables take {size} bytes; at most {_total_limit() // 2} can travel.")
    for name, value in chosen.items():
        if len(os.fsencode(name)) + len(os.fsencode(value)) + 1 > _ARGUMENT_BYTES:
            raise UserError(
                f"The variable {name} is too long: with its name {_ARGUMENT_BYTES} bytes are allowed (MAX_ARG_STRLEN)."
            )
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "cwd": text(cwd),
        "pwd": text(written) if is_same else "",
        "env": [[text(name), text(value)] for name, value in sorted(chosen.items())],
        "umask": mask,
    }


def ranges_of_lines(
    arguments: argparse.Namespace, template: dict[str, Any], lines: Iterable[str]
) -> list[dict[str, Any]]:
    """The jobs of the lines as they travel: ``{}`` is replaced in the command, the name and the paths of the output.

    Raises `UserError` naming the line that cannot be used, and when two of the jobs would write one file.
    """
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    argvs = argvs_of_lines(arguments.command, numbered)
    _check_files_of_lines(arguments, numbered)
    if not any("{}" in (getattr(arguments, key) or "") for key in ("name", "stdout", "stderr")):
        return [{**template, "argvs": argvs}]
    ranges = []
    for (number, line), argv in zip(numbered, argvs, strict=True):
        payload: dict[str, Any] = {"argv": argv}
        if arguments.name is not None:
            payload["name"] = text(_checked_name(arguments.name.replace("{}", line), f" (line {number})"))
        for stream in ("stdout", "stderr"):
            path = getattr(arguments, stream)
            if path is not None:
                payload[stream] = text(_output_path(path.replace("{}", line), stream))
        ranges.append({**template, "payload": payload})
    return ranges


def _check_files_of_lines(arguments: argparse.Namespace, numbered: Sequence[tuple[int, str]]) -> None:
    """Raises `UserError` when two jobs would write one file: each begins it anew, so only one's output would be left.

    One job may well write both of its streams into one file.
    """
    patterns = [path for path in (arguments.stdout, arguments.stderr) if path is not None]
    written: dict[str, int] = {}
    for number, line in numbered if patterns else ():
        for pattern in patterns:
            path = pattern.replace("{}", line)
            if path.strip().lower() == DISCARD:
                continue
            first = written.setdefault(os.path.normpath(path), number)
            if first != number and not _is_no_file(path):
                raise UserError(
                    f"The jobs of the lines {first} and {number} would both write {path}; "
                    "the output of one of them would be lost.",
                    hint="Put {} where the line shall stand, for example -o 'out-{}.txt', or leave -o and -e out: "
                    "`kueue log ID` shows the output of a job. `null` throws it away.",
                )


def _is_no_file(path: str) -> bool:
    """Is it a device, a pipe or the like, into which many may write?"""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def argvs_of_lines(command: Sequence[str], numbered: Iterable[tuple[int, str]]) -> list[list[WireText]]:
    """The commands for the lines: `command` with every ``{}`` replaced, or ``sh -c LINE`` without a command.

    `numbered`: the lines that are not empty, with their numbers. Raises `UserError` naming one that cannot be used.
    """
    if command and not any("{}" in word for word in command):
        raise UserError(
            "With --each-line the command needs {} where the line shall stand.",
            hint="For example: kueue cmd --each-line files.txt gzip {}",
        )
    argvs: list[list[WireText]] = []
    for number, line in numbered:
        argv = [word.replace("{}", line) for word in command] if command else ["sh", "-c", line]
        check_command(argv, f"The command of line {number}")
        argvs.append([text(word) for word in argv])
    if not argvs:
        raise UserError("There is no line that is not empty: no job was made.")
    return argvs


def check_command(argv: Sequence[str], what: str) -> None:
    """Raises `UserError` when no machine could execute these arguments; `what` begins its sentence."""
    if not argv[0]:
        raise UsageError(f"{what} has an empty word where the program should stand.")
    total = 0
    for word in argv:
        if "\0" in word:
            raise UserError(f"{what} holds a zero byte, which no argument may have.")
        size = len(word) if word.isascii() else len(os.fsencode(word))
        if size > _ARGUMENT_BYTES:
            raise UserError(
                f"{what} has an argument of {size} bytes; {_ARGUMENT_BYTES} are allowed (MAX_ARG_STRLEN).",
                hint="Put the text into a file and pass its name.",
            )
        total += size + 9  # the closing zero and the pointer count as well, execve(2)
    limit = _total_limit() - _ENVIRONMENT_RESERVE_BYTES
    if total > limit:
        raise UserError(
            f"{what} takes {total} bytes of arguments; {limit} are allowed (ARG_MAX, less room for the environment).",
            hint="Put the arguments into a file and pass its name.",
        )


def text(value: str) -> WireText:
    """A string as the system gave it to us, in the form that travels, whatever locale we run under."""
    if value.isascii():
        return value
    return os_to_wire(os.fsencode(value).decode("utf-8", "surrogateescape"))


def _lines(path: str) -> Iterable[str]:
    """Lines without their ends; bytes that cannot be decoded stay as surrogate escapes."""
    # Only a line feed ends a line: splitlines() would also cut at form feeds and the like.
    try:
        if path == "-":
            if sys.stdin is None:
                raise UserError("stdin is closed: there are no lines to read.")
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return [os.fsdecode(line.removesuffix(b"\r")) for line in data.split(b"\n")]


def _checked_name(name: str, where: str = "") -> str:
    # In a locale without its letters a name arrives as bytes in disguise, which would count as unprintable.
    letters = os.fsencode(name).decode("utf-8", "replace")
    if not width(letters.strip()) or harmless(letters) != letters or len(letters) > _NAME_CHARACTERS:
        raise UserError(
            f"Not a name for a job{where}: {name[:60]!r}.",
            hint=f"Take 1 to {_NAME_CHARACTERS} printable characters.",
        )
    return name


def _output_path(path: str, stream: str) -> str:
    if path.strip().lower() == DISCARD:
        return DISCARD
    if not path or "\0" in path:
        raise UserError(f"--{stream} needs the path of a file.")
    return path


def _is_same_directory(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _total_limit() -> int:
    """Bytes of arguments and environment that execve takes here: a quarter of the stack, at most 6 MiB (execve(2))."""
    return min(os.sysconf("SC_ARG_MAX"), 6 * 1024 * 1024)
