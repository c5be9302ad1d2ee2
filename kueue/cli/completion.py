"""Completion: prints the script for a shell, and answers what the script asks at each press of TAB.

Rules
- `answer` speaks the protocol of argcomplete: the line in ``COMP_LINE``, candidates on descriptor 8. argcomplete reads
  the line against the parser of `arguments`; what a value may be is decided here, by the metavar of its argument.
- A script that sets ``_KUEUE_NATIVE`` completes files and commands itself, with all the shell knows of them; it is told
  so by the exit code. To other scripts the names are listed.
- Nothing is ever written to stderr: the person is in the middle of a line.
"""
# pathlib (5 ms) is left out, a press of TAB must not be felt:
# ruff: noqa: PTH111, PTH112, PTH119, PTH208

from __future__ import annotations

import argparse
import os
import stat
from contextlib import suppress
from functools import partial

from argcomplete.finders import ExclusiveCompletionFinder
from argcomplete.lexers import split_line

from kueue.cli import arguments, candidates, programs, verbs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from kueue.cli.session import Session

    Completer = Callable[..., Mapping[str, str]]

FILES_EXIT_CODE = 10
"""The shell is to complete a file name."""
COMMAND_EXIT_CODE = 11
"""The shell is to complete another command; the answer is the number of words in front of it."""

_NAMES_LIMIT = 5000
"""More commands than any PATH holds that people look through."""
_LIVE = ("held", "pending", "offered", "running")
_JOB_STATES: dict[str, tuple[str, ...]] = {
    "wait-job": _LIVE,
    "follow": _LIVE,
    "remove-job": _LIVE,
    "explain": ("held", "pending", "offered"),
    "hold": ("pending",),
    "release": ("held",),
}
"""Which jobs a verb is of use for; all, for a verb that is not here."""
_NODE_STATES = {"offline": ("online",), "online": ("offline",), "dead": ("offline", "silent", "away", "set aside")}
"""Which workers can become what was typed."""


class _Native(Exception):
    """What is to be completed the shell knows better."""

    def __init__(self, exit_code: int, words_before: int = 0) -> None:
        super().__init__()
        self.exit_code = exit_code
        self.words_before = words_before


def complete(session: Session) -> int:
    """Prints the script; reads no settings and asks nobody."""
    from kueue.cli import shells  # noqa: PLC0415 - a press of TAB does without

    session.screen.print(shells.script(session.arguments.shell).rstrip("\n"))
    return 0


def is_asked(environ: Mapping[str, str] = os.environ) -> bool:
    """Was this program started by a completion script?"""
    return "_ARGCOMPLETE" in environ and ("COMP_LINE" in environ or "COMMAND_LINE" in environ)


def leave_with_answer() -> None:
    """Answers the completion script and ends the process at once, whatever a question to the server is doing."""
    code = 1
    try:
        code = answer(os.environ, _written)
    except BaseException:  # noqa: BLE001 - a line that cannot be completed is left as it is, without a word
        if "_ARC_DEBUG" in os.environ:
            import traceback  # noqa: PLC0415 - argcomplete's own switch for those who look for a fault

            traceback.print_exc()
    os._exit(code)


def answer(environ: Mapping[str, str], write: Callable[[bytes], None]) -> int:
    """Hands the candidates for the line in `environ` to `write`. Returns the exit code for the script."""
    shell = environ.get("_ARGCOMPLETE_SHELL", "bash")
    line = environ.get("COMP_LINE")
    if line is None:  # tcsh has a variable of its own, which holds all commands of the line
        line = _last_command(environ.get("COMMAND_LINE", ""))
    # Bash 4.2 counts bytes, and all count from the start of the line: what is longer than the line means its end.
    point = min(int(environ.get("COMP_POINT") or len(line)), len(line))
    prequote, prefix, _, words, wordbreak = split_line(line, point)
    words = words[int(environ["_ARGCOMPLETE"]) - 1 :]
    is_native = environ.get("_KUEUE_NATIVE") == "1"
    finder = _Finder(always_complete_options=False, append_space=False)
    finder.shell = shell
    try:
        found = _found(finder, words, prefix, prequote, wordbreak)
    except _Native as native:
        if is_native:
            if native.exit_code == COMMAND_EXIT_CODE:
                write(str(native.words_before).encode())
            return native.exit_code
        names = candidates.in_time(partial(_names, native, prefix, words), [])
        found = dict.fromkeys(finder.quote_completions(names, prequote, wordbreak), "")
    write(_laid_out(found, shell, environ).encode("utf-8", "surrogateescape"))
    return 0


def _found(finder: _Finder, words: Sequence[str], prefix: str, prequote: str, wordbreak: int | None) -> dict[str, str]:
    """The candidates as they stand in the line of that shell, each with its description. Raises `_Native`."""
    program = os.path.basename(words[0]) if words else ""
    if program in programs.PROGRAMS:
        parser, verb = programs.parser(program), ""
    else:
        parser, verb = arguments.parser(), _verb(words)
        if verb and verb not in verbs.VERBS:
            return {}
    if verb == "cmd":
        _leave_command_to_shell(words, prefix)
    _attach(parser, verb, words)
    finder.read_with(parser)
    comp_words = [*words]
    if prefix.startswith("-") and "=" in prefix:
        comp_words.append(prefix.partition("=")[0])  # so that argcomplete knows whose value is being typed
    # The public entry of argcomplete would print, too.
    found = finder._get_completions(comp_words, prefix, prequote, wordbreak)  # type: ignore[no-untyped-call]  # noqa: SLF001
    shown = finder.get_display_completions()
    return {one: shown.get(one) or "" for one in found}


class _Finder(ExclusiveCompletionFinder):
    """Offers no option twice, and quotes for the shell that asks."""

    shell = "bash"

    def read_with(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def collect_completions(
        self, active_parsers: list[argparse.ArgumentParser], parsed_args: argparse.Namespace, cword_prefix: str
    ) -> list[str]:
        """Options only when a dash was typed, or when the verb takes nothing else."""
        last = active_parsers[-1]
        # argparse has no other way to ask.
        self.always_complete_options = not last._get_positional_actions()  # noqa: SLF001
        return super().collect_completions(active_parsers, parsed_args, cword_prefix)

    def quote_completions(
        self, completions: list[str], cword_prequote: str, last_wordbreak_pos: int | None
    ) -> list[str]:
        """For bash as argcomplete does it; the other shells quote what they insert, except PowerShell."""
        if self.shell == "bash":
            return super().quote_completions(completions, cword_prequote, last_wordbreak_pos)
        if self.shell == "powershell":
            for one in completions:
                quoted = _quoted_for_powershell(one)
                self._display_completions[quoted] = self._display_completions.get(one, "")
            return [_quoted_for_powershell(one) for one in completions]
        return completions


def _verb(words: Sequence[str]) -> str:
    position = arguments.verb_position(words[1:])
    return words[position + 1] if position is not None else ""


def _leave_command_to_shell(words: Sequence[str], prefix: str) -> None:
    """Raises `_Native` when the cursor is in the command that ``cmd`` is to run."""
    position = arguments.verb_position(words[1:])
    assert position is not None
    begin = position + 2
    rest = [*words[begin:], prefix]
    cmd = arguments.parser_of("cmd")
    own = arguments.split_command(cmd, rest)
    if own >= len(rest):
        return
    if rest[own] == "--":
        if own == len(rest) - 1:
            return  # it is still being typed
        own += 1
    raise _Native(COMMAND_EXIT_CODE, begin + own)


def _attach(parser: argparse.ArgumentParser, verb: str, words: Sequence[str]) -> None:
    """Tells argcomplete what each argument takes."""
    for action in _actions(parser, verb):
        if action.nargs == 0:
            continue
        chosen = _completer(action, verb, words) if action.choices is None else partial(_choices, action.choices)
        action.completer = chosen  # type: ignore[attr-defined]


def _actions(parser: argparse.ArgumentParser, verb: str) -> Iterable[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            if verb in action.choices:
                yield from _actions(action.choices[verb], "")
        else:
            yield action


def _completer(action: argparse.Action, verb: str, words: Sequence[str]) -> Completer:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in {"PATH", "FILE", "DIR", "FOLDER"}:
        return _files
    if metavar == "NAME[=VALUE]":
        return _variables
    if metavar == "NAME[=N]":
        return _resources
    if metavar == "ID" and verb == "show-worker":
        return partial(_worker_ids, words)
    if metavar == "ID":
        return partial(_jobs, verb, words)
    if metavar == "NAME" and verb == "node":
        return partial(_worker_names, words)
    if metavar.startswith("HOST"):
        return partial(_hosts, words)
    return _nothing


def _choices(choices: Iterable[object], **_: Any) -> dict[str, str]:
    # argcomplete would show the help of the argument beside each of them.
    return {str(one): "" for one in choices}


def _nothing(**_: Any) -> dict[str, str]:
    return {}


def _files(**_: Any) -> dict[str, str]:
    raise _Native(FILES_EXIT_CODE)


def _variables(**_: Any) -> dict[str, str]:
    return dict.fromkeys((name for name in sorted(os.environ) if candidates.is_safe(name)), "")


def _resources(*, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    return candidates.resources(_config_of(parsed_args), prefix)


def _jobs(verb: str, words: Sequence[str], *, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    states = _JOB_STATES.get(verb) or tuple(getattr(parsed_args, "states", None) or ())
    return candidates.jobs(_config_of(parsed_args), prefix, states, typed=words)


def _worker_ids(words: Sequence[str], *, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    return candidates.worker_ids(_config_of(parsed_args), prefix, typed=words)


def _worker_names(words: Sequence[str], *, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    states = _NODE_STATES.get(getattr(parsed_args, "state", "") or "", ())
    return candidates.worker_names(_config_of(parsed_args), prefix, states, typed=words)


def _hosts(words: Sequence[str], *, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    return candidates.hosts(_config_of(parsed_args), prefix, typed=words)


def _config_of(parsed_args: argparse.Namespace) -> str | None:
    return getattr(parsed_args, "config", None)


def _names(native: _Native, prefix: str, words: Sequence[str]) -> list[str]:
    """Files or commands, for a script that cannot complete them."""
    is_first = native.exit_code == COMMAND_EXIT_CODE and len(words) == native.words_before
    option, equals, value = prefix.partition("=")
    if native.exit_code == FILES_EXIT_CODE and option.startswith("-") and equals:
        return [f"{option}={name}" for name in _file_names(value)]
    return _command_names(prefix) if is_first and "/" not in prefix else _file_names(prefix)


def _file_names(prefix: str) -> list[str]:
    folder, slash, start = prefix.rpartition("/")
    try:
        names = os.listdir(os.path.expanduser(folder + slash) or ".")
    except OSError:
        return []
    meant = [
        name
        for name in sorted(names)
        if name.startswith(start) and (start or not name.startswith(".")) and "\n" not in name and "\v" not in name
    ]
    paths = [folder + slash + name for name in meant[:_NAMES_LIMIT]]
    return [path + "/" if os.path.isdir(os.path.expanduser(path)) else path for path in paths]


def _command_names(prefix: str) -> list[str]:
    found: set[str] = set()
    for folder in os.environ.get("PATH", "").split(":"):
        with suppress(OSError), os.scandir(folder or ".") as entries:
            found.update(one.name for one in entries if one.name.startswith(prefix) and _is_executable(one))
    return sorted(name for name in found if candidates.is_safe(name))[:_NAMES_LIMIT]


def _is_executable(entry: os.DirEntry[str]) -> bool:
    try:
        mode = entry.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _laid_out(found: Mapping[str, str], shell: str, environ: Mapping[str, str]) -> str:
    """The answer as argcomplete's scripts expect it of argcomplete."""
    separator = environ.get("_ARGCOMPLETE_IFS", "\v")
    between = environ.get("_ARGCOMPLETE_DFS", "")
    lines = []
    for one, description in found.items():
        if shell == "tcsh" and any(character.isspace() for character in one):
            continue  # it would take the parts for candidates
        described = " ".join(description.split())
        if shell == "zsh":
            escaped = one.replace("\\", "\\\\").replace(":", "\\:")
            lines.append(f"{escaped}:{described}" if described else escaped)
        else:
            lines.append(f"{one}{between}{described}" if between else one)
    return separator.join(lines)


def _quoted_for_powershell(text: str) -> str:
    if text and all(character.isalnum() or character in "-_./:=+~" for character in text):
        return text
    return "'" + text.replace("'", "''") + "'"


def _last_command(line: str) -> str:
    """What stands behind the last operator of a line of tcsh, quotes left aside."""
    quote, begin = "", 0
    for position, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in ";|&(`":
            begin = position + 1
    return line[begin:].lstrip()


def _written(data: bytes) -> None:
    """To descriptor 8, or to the file that a shell without further descriptors names."""
    named = os.environ.get("_ARGCOMPLETE_STDOUT_FILENAME")
    descriptor = os.open(named, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if named else 8
    while data:
        data = data[os.write(descriptor, data) :]
