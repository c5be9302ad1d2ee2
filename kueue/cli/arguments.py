"""The grammar of the command line: what its words mean, and its help.

Rules
- Nothing here touches the world, and only `argparse` is imported: completion needs this module at every TAB.
- The first word that is no option of ``cmd`` starts the command; all that follows belongs to it.
"""

from __future__ import annotations

import argparse
import os
import sys

from kueue import __version__
from kueue.cli.verbs import ALSO_CALLED, VERBS, Verb, duration
from kueue.errors import UsageError

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, NoReturn

    from _typeshed import SupportsWrite

# argparse asks gettext for translations of its few texts, which imports locale and looks through the file system.
argparse._ = lambda text: text  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would leave the program, and `OSError` where it would not tell."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{self.prog}: {message}", hint=f"{self.format_usage().strip()}\n`{self.prog} --help` explains."
        )

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # The one of argparse keeps quiet when help cannot be written.
        (file or sys.stdout).write(message)


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal."""

    width: int | None = None

    def __init__(self, prog: str) -> None:
        # argparse makes a formatter for every argument; it would import shutil and ask the terminal each time.
        if _Layout.width is None:
            _Layout.width = _terminal_width() - 2
        super().__init__(prog, max_help_position=30, width=_Layout.width)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What the command line says; ``verb`` is None when none was given.

    Raises `UsageError`, and `SystemExit` after ``--help`` and ``--version``.
    """
    position = verb_position(words)
    name = words[position] if position is not None else None
    if position is not None and name == "help":
        about = [*words[:position], *words[position + 1 :]]
        # Directly behind the verb: what else there is may be a command, and is not to be run.
        end = len(about) if (at := verb_position(about)) is None else at + 1
        return parse([*about[:end], "--help", *about[end:]])
    if position is None or name is None or name not in VERBS:
        try:
            return parser().parse_args(words)
        except UsageError as error:
            if name is None or name in VERBS or "VERB" not in str(error):
                raise
            raise UsageError(f"kueue: there is no verb '{name}'.", hint=_verb_meant(name)) from error
    top, chosen_parser = _parser_of(name)
    own, command = words[position + 1 :], list[str]()
    if name == "cmd":
        # Options and command are told apart here: argparse would look for its own options in the command as well.
        end = split_command(chosen_parser, own)
        own, command = own[:end], list(own[end:])
    try:
        chosen, unknown = top.parse_known_args([*words[: position + 1], *_options_first(chosen_parser, own)])
    except UsageError:
        unknown = _unknown_options(chosen_parser, own)
        if not unknown:
            raise
    if unknown:
        chosen_parser.error(f"unknown: {' '.join(unknown)}{_option_meant(top, chosen_parser, unknown)}")
    chosen.command = command[1:] if command[:1] == ["--"] else command
    return chosen


def _option_meant(top: argparse.ArgumentParser, one: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """What is to be typed instead of the first option that the verb does not have, as the rest of a sentence."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake pays for it

    option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    if option in _takes_value(top):
        return f"; {option} stands before the verb"
    close = get_close_matches(option, _takes_value(one), n=1) if option.startswith("--") else []
    return f"; did you mean {close[0]}?" if close else ""


def _verb_meant(word: str) -> str:
    """What is to be typed instead of a word that is no verb."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake pays for it

    if "/" in word:
        return f"To run it: kueue cmd {word}"
    close = [verb for verb, others in ALSO_CALLED.items() if word.lower() in others.split()]
    close = close or get_close_matches(word.lower(), VERBS, n=1) or [verb for verb in VERBS if word in verb.split("-")]
    known = "`kueue --help` lists the verbs."
    return f"Did you mean {' or '.join(close)}? {known}" if close else f"{known} To run a command: kueue cmd {word}"


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = _top_parser()
    _add_verbs(top, VERBS.values())
    return top


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options and arguments of one verb."""
    return _parser_of(name)[1]


def _parser_of(name: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of one verb alone, which is built much faster, and in it the part that is the verb's own."""
    top = _top_parser()
    return top, _add_verbs(top, (VERBS[name],))


def _top_parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="kueue",
        description="Run commands on the free machines of a laboratory.",
        epilog="Begin with `kueue up` on one machine, then: kueue cmd ./my_script.py",
        formatter_class=_Layout,
        allow_abbrev=False,
    )
    top.add_argument("-c", "--config", metavar="PATH", help="configuration file to use")
    top.add_argument("-V", "--version", action="version", version=f"kueue {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error comes from")
    top.add_argument(
        "--patience",
        type=duration,
        metavar="DURATION",
        help="how long to wait for a server that is away (default 30 s, 6 s for verbs that only look; wait-job and "
        "follow wait for ever)",
    )
    return top


def _add_common(one: argparse.ArgumentParser) -> None:
    """The options of all verbs, for those who type them behind one; short ones may mean other things there."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    one.add_argument("--config", metavar="PATH", **hidden)
    one.add_argument("--debug", action="store_true", **hidden)
    one.add_argument("--patience", type=duration, metavar="DURATION", **hidden)


def _add_verbs(top: argparse.ArgumentParser, verbs: Iterable[Verb]) -> argparse.ArgumentParser:
    """Returns the parser of the last verb."""
    group = top.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser, title="verbs", prog="kueue")
    one = top
    for verb in verbs:
        one = group.add_parser(
            verb.name,
            help=verb.summary,
            description=f"{verb.summary}.{' ' if verb.detail else ''}{verb.detail}",
            epilog=f"example:\n  {verb.example}",
            formatter_class=_Layout,
            allow_abbrev=False,
        )
        one.set_defaults(handler=verb.handler)
        verb.fill(one)
        _add_common(one)
    return one


def split_command(cmd: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """How many of the words after ``cmd`` are its options and their values."""
    takes_value = _takes_value(cmd)
    index = 0
    while index < len(words) and _is_option(words[index]):
        index = _behind_option(takes_value, words, index)
    return min(index, len(words))


def _unknown_options(one: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Said first: what stands behind one may have been meant as its value, and is no id then."""
    takes_value = _takes_value(one)
    unknown: list[str] = []
    for begin, _ in _pieces(takes_value, words):
        word = words[begin]
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if _is_option(word) and option not in takes_value and not option[1:].isdigit():
            unknown.append(word)
    return unknown


def _options_first(one: argparse.ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """The words of a verb in an order that argparse takes: it wants all ids in one place."""
    options: list[str] = []
    others: list[str] = []
    end = 0
    for begin, end in _pieces(_takes_value(one), words):
        if end > len(words):
            return words  # a value is missing, and no id must become it
        (options if _is_option(words[begin]) else others).extend(words[begin:end])
    return [*options, *others, *words[end:]]


def _pieces(takes_value: dict[str, bool], words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Begin and end of each option with its value and of each other word, up to ``--``; as of `_behind_option`."""
    begin = 0
    while begin < len(words) and words[begin] != "--":
        end = _behind_option(takes_value, words, begin) if _is_option(words[begin]) else begin + 1
        yield begin, end
        begin = end


def _takes_value(one: argparse.ArgumentParser) -> dict[str, bool]:
    """The options, and whether the next word belongs to it."""
    return {
        option: action.nargs != 0
        for action in one._actions  # noqa: SLF001 - argparse has no other way to ask
        for option in action.option_strings
    }


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in {"-", "--"}


def _behind_option(takes_value: dict[str, bool], words: Sequence[str], index: int) -> int:
    """The index behind an option and its value; more than there are words if the value is missing."""
    word = words[index]
    if word.startswith("--"):
        return index + 1 + ("=" not in word and takes_value.get(word, False))
    for place, letter in enumerate(word[1:], 1):
        if takes_value.get(f"-{letter}"):
            return index + 1 + (place == len(word) - 1)  # otherwise the rest of the word is the value
    return index + 1


def _terminal_width() -> int:
    try:
        return max(40, os.get_terminal_size(1).columns)
    except OSError:
        return 100


def verb_position(words: Sequence[str]) -> int | None:
    """Where the verb stands: behind the global options."""
    index = 0
    while index < len(words):
        word = words[index]
        if not word.startswith("-") or word == "-":
            return index
        index += 2 if word in {"-c", "--config", "--patience"} else 1
    return None
