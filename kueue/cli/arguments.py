"""The grammar of the command line: every verb, its options and its help.

Rules
- Nothing here touches the world, and only `argparse` is imported: completion needs this module at every TAB.
- A verb names the function that carries it out as ``module:function``; the module is loaded when the verb is used.
- The first word that is no option of ``cmd`` starts the command; all that follows belongs to it.
"""

from __future__ import annotations

import argparse
import os
import sys

from kueue import __version__
from kueue.errors import UsageError, UserError
from kueue.units import merge_id_ranges, parse_duration, parse_id_ranges

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from _typeshed import SupportsWrite

PATIENCE_SECONDS, LOOK_PATIENCE_SECONDS = 30.0, 6.0
"""How long a verb waits for a server that is away: one that changes something outlasts a restart of the server, one
that only looks has nothing to lose by saying soon that there is nothing to see."""
LOOKING = frozenset({"list-jobs", "show-job", "list-workers", "show-worker", "list-resources", "log", "explain"})
_ALSO_CALLED = {
    "cmd": "run submit add exec queue enqueue start sbatch qsub",
    "list-jobs": "list ls jobs ps status stat squeue qstat",
    "show-job": "show info",
    "wait-job": "wait",
    "follow": "tail watch",
    "log": "logs output cat",
    "remove-job": "remove rm cancel kill delete scancel qdel",
    "clean-jobs": "clean",
    "list-workers": "workers nodes hosts machines sinfo",
    "list-resources": "resources licences licenses",
    "down": "stop shutdown",
}
"""Words that other queues have for our verbs."""
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell", "elvish")
"""The shells that can be taught to complete."""

# argparse asks gettext for translations of its few texts, which imports locale and looks through the file system.
argparse._ = lambda text: text  # type: ignore[attr-defined]


class Verb:
    """One verb of the command.

    `summary`: one line in the imperative. `handler`: ``module:function`` below `kueue.cli`. `fill` adds its arguments.
    """

    __slots__ = ("detail", "example", "fill", "handler", "name", "summary")

    def __init__(
        self,
        name: str,
        summary: str,
        handler: str,
        example: str,
        fill: Callable[[argparse.ArgumentParser], None],
        detail: str = "",
    ) -> None:
        self.name = name
        self.summary = summary
        self.handler = handler
        self.example = example
        self.fill = fill
        self.detail = detail


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
    close = [verb for verb, others in _ALSO_CALLED.items() if word.lower() in others.split()]
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
        type=_duration,
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
    one.add_argument("--patience", type=_duration, metavar="DURATION", **hidden)


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
    index = 0
    while index < len(words) and words[index] != "--":
        word = words[index]
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if _is_option(word) and option not in takes_value and not option[1:].isdigit():
            unknown.append(word)
        index = _behind_option(takes_value, words, index) if _is_option(word) else index + 1
    return unknown


def _options_first(one: argparse.ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """The words of a verb in an order that argparse takes: it wants all ids in one place."""
    takes_value = _takes_value(one)
    options: list[str] = []
    others: list[str] = []
    index = 0
    while index < len(words) and words[index] != "--":
        is_option = _is_option(words[index])
        end = _behind_option(takes_value, words, index) if is_option else index + 1
        if end > len(words):
            return words  # a value is missing, and no id must become it
        (options if is_option else others).extend(words[index:end])
        index = end
    return [*options, *others, *words[index:]]


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


def _ids(text: str) -> list[tuple[int, int]]:
    try:
        return parse_id_ranges(text)
    except UserError as error:
        is_word = text[:1].isalpha()
        hint = "Names are no ids: `kueue list-jobs` and `kueue list-workers` show the ids." if is_word else error.hint
        raise argparse.ArgumentTypeError(f"{error} {hint}") from error


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{error} {error.hint}".rstrip()) from error


def _megabytes(text: str) -> int:
    try:
        return _whole(0)(text)
    except argparse.ArgumentTypeError as error:
        # Of 8G, 8GB and 1.5g it is plain what is meant; what was typed and what is taken should still be one number.
        number, unit = text.rstrip("iIbB")[:-1], text.rstrip("iIbB")[-1:].lower()
        factor = {"m": 1, "g": 1024, "t": 1024 * 1024}.get(unit)
        try:
            meant = int(float(number) * factor) if factor else 8192
        except (ValueError, OverflowError):
            meant = 8192
        raise argparse.ArgumentTypeError(f"{error}: memory is given in MB, like {meant}") from error


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        # ASCII digits alone: int() also takes blanks, signs and underscores.
        if not (text.isascii() and text.isdigit()) or len(text) > 18 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {least} to {most}")
        return int(text)

    return number


class _Ranges(argparse.Action):
    """Collects id ranges into one sorted list without overlaps."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - the signature is argparse's
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - as above
    ) -> None:
        groups: list[list[tuple[int, int]]] = values if isinstance(values, list) else []
        setattr(namespace, self.dest, merge_id_ranges(one for group in groups for one in group))


def _add_ids(one: argparse.ArgumentParser, what: str = "job", *, optional: bool = False) -> None:
    one.add_argument(
        "ids",
        metavar="ID",
        nargs="*" if optional else "+",
        type=_ids,
        action=_Ranges,
        default=[],
        help=f"{what} ids and ranges, like 3 7-9 or 3,7-9",
    )


def _add_json(one: argparse.ArgumentParser, *, quiet: str = "") -> None:
    one.add_argument("--json", action="store_true", help="print JSON for programs")
    if quiet:
        one.add_argument("-q", "--quiet", action="store_true", help=quiet)


def _fill_cmd(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("-j", "--job-slots", type=_whole(1), default=1, metavar="N", help="job slots to take (default 1)")
    add("-c", "--cpus", type=_whole(0), metavar="N", help="cores to take (default: job_default_cpus)")
    add("-r", "--ram-mb", type=_megabytes, metavar="N", help="memory to take in MB (default: job_default_ram_mb)")
    add("--resource", action="append", default=[], metavar="NAME[=N]", help="lab-wide resource to take; repeatable")
    add("--gpus", type=_whole(0), default=0, metavar="N", help="GPUs of the worker to take")
    add("-o", "--stdout", metavar="PATH", help="write stdout to this file; null: throw it away")
    add("-e", "--stderr", metavar="PATH", help="write stderr to this file; null: throw it away")
    add("-w", "--wait", action="store_true", help="wait for the end, print the return code, exit with it")
    add("--name", metavar="TEXT", help="a name to find the job by in listings")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable for the job; NAME copies ours")
    add("--timeout", type=_duration, metavar="DURATION", help="stop the job after this running time, like 90m or 2d")
    add("--hold", action="store_true", help="do not start before `kueue release`")
    add("--max-attempts", type=_whole(1), default=3, metavar="N", help="give up when so many were lost (default 3)")
    add(
        "--on-lost",
        choices=("rerun", "wait", "fail"),
        help="when the worker is silent: run elsewhere, wait for it, or give up (default: the setting on_lost)",
    )
    add("--keep-background", action="store_true", help="leave processes alone that outlive the command")
    add(
        "--each-line",
        metavar="FILE",
        help="one job for each line that is not empty, `-`: of stdin; {} in the command, -o, -e and --name is the "
        "line, and without a command the line is run by sh -c",
    )
    add("--refuse-impossible", action="store_true", help="refuse the job if no worker known now could run it")
    add("-q", "--quiet", action="store_true", help="no remarks")
    one.usage = "kueue cmd [options] [--] COMMAND [ARG ...]"


def _fill_list_jobs(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "-n",
        "--num-jobs",
        type=_whole(0),
        metavar="N",
        help="show the N most recent (default: one page; all of the ids given, with -q, and with --json)",
    )
    for letter, state in zip(
        "porsfc", ("pending", "offered", "running", "succeeded", "failed", "canceled"), strict=True
    ):
        one.add_argument(
            f"-{letter}", f"--{state}", action="append_const", dest="states", const=state, help=f"show {state} jobs"
        )
    one.add_argument("--held", action="append_const", dest="states", const="held", help="show held jobs")
    _add_ids(one, optional=True)
    _add_json(one, quiet="print ids only")


def _fill_ids(one: argparse.ArgumentParser) -> None:
    _add_ids(one)


def _fill_show_job(one: argparse.ArgumentParser) -> None:
    _add_ids(one)
    _add_json(one)


def _fill_wait_job(one: argparse.ArgumentParser) -> None:
    _add_ids(one)
    one.add_argument("-q", "--quiet", action="store_true", help="no remarks and no progress")


def _fill_remove_job(one: argparse.ArgumentParser) -> None:
    one.add_argument("-k", "--kill", action="store_true", help="also stop jobs that run")
    one.add_argument("--force", action="store_true", help="end the record at once, whatever the worker says")
    _add_ids(one)


def _fill_clean_jobs(one: argparse.ArgumentParser) -> None:
    one.add_argument("-a", "--all", action="store_true", help="failed jobs too")


def _fill_list_workers(one: argparse.ArgumentParser) -> None:
    _add_json(one, quiet="print ids only")


def _fill_show_worker(one: argparse.ArgumentParser) -> None:
    _add_ids(one, "worker")
    _add_json(one)


def _fill_list_resources(one: argparse.ArgumentParser) -> None:
    _add_json(one, quiet="print names only")


def _fill_log(one: argparse.ArgumentParser) -> None:
    one.add_argument("--stderr", action="store_true", help="stderr instead of stdout")
    one.add_argument("--raw", action="store_true", help="every byte as the job wrote it, also to a terminal")
    _add_ids(one)


def _fill_explain(one: argparse.ArgumentParser) -> None:
    _add_ids(one)
    _add_json(one)


def _fill_node(one: argparse.ArgumentParser) -> None:
    one.add_argument("state", choices=("offline", "online", "dead"), help="what the worker is from now on")
    one.add_argument("--force", action="store_true", help="declare dead also a worker that was heard just now")
    one.add_argument("names", nargs="+", metavar="NAME", help="names or ids of workers")


def _fill_secret(one: argparse.ArgumentParser) -> None:
    one.add_argument("step", choices=("rotate", "status", "reload", "finish"), help="what to do")
    one.add_argument("--force", action="store_true", help="finish although the old secret may still be needed")


def _fill_version(one: argparse.ArgumentParser) -> None:
    _add_json(one)


def _fill_doctor(one: argparse.ArgumentParser) -> None:
    _add_json(one)


def _fill_complete(one: argparse.ArgumentParser) -> None:
    one.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def _fill_nothing(_: argparse.ArgumentParser) -> None:
    """For a verb that takes no arguments."""


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "cmd",
            "Run a command on a free machine",
            "submit:cmd",
            "kueue cmd -c 4 --resource genus ./my_script.py --its-own-option",
            _fill_cmd,
            "Prints the id of the job.\nOptions stand before the command; all behind its first word belongs to it.",
        ),
        Verb("list-jobs", "List jobs", "jobs:list_jobs", "kueue list-jobs --running --failed", _fill_list_jobs),
        Verb("show-job", "Show a job and its output", "jobs:show_job", "kueue show-job 7", _fill_show_job),
        Verb(
            "wait-job",
            "Wait for the end of jobs",
            "jobs:wait_job",
            "kueue wait-job 7 10-19 && echo all succeeded",
            _fill_wait_job,
            "Exits with the code of the job, with the highest if there are several.",
        ),
        Verb(
            "remove-job",
            "Cancel jobs",
            "jobs:remove_job",
            "kueue remove-job --kill 7",
            _fill_remove_job,
            "Jobs that run already are left alone unless --kill is given.",
        ),
        Verb(
            "clean-jobs",
            "Forget succeeded and canceled jobs",
            "jobs:clean_jobs",
            "kueue clean-jobs --all",
            _fill_clean_jobs,
        ),
        Verb("list-workers", "List workers", "cluster:list_workers", "kueue list-workers", _fill_list_workers),
        Verb("show-worker", "Show a worker", "cluster:show_worker", "kueue show-worker 0", _fill_show_worker),
        Verb(
            "list-resources",
            "List lab-wide resources",
            "cluster:list_resources",
            "kueue list-resources",
            _fill_list_resources,
        ),
        Verb(
            "follow",
            "Print the output of jobs while they run",
            "output:follow",
            "kueue follow 7",
            _fill_ids,
            "Of several one after the other. Ends with the last and exits with the worst\ncode of all.",
        ),
        Verb(
            "log",
            "Print the output of jobs",
            "output:log",
            "kueue log --stderr 7",
            _fill_log,
            "All of it when its worker is there,\nelse what the server keeps; a remark on stderr says which.",
        ),
        Verb("explain", "Say why a job waits", "jobs:explain", "kueue explain 7", _fill_explain),
        Verb("hold", "Keep waiting jobs from starting", "jobs:hold", "kueue hold 7-9", _fill_ids),
        Verb("release", "Let held jobs start", "jobs:release", "kueue release 7-9", _fill_ids),
        Verb(
            "node",
            "Take a worker out, back in, or declare it dead",
            "cluster:node",
            "kueue node offline ralab04",
            _fill_node,
            "An offline worker finishes its jobs and gets no new ones. `dead` is your word\n"
            "that nothing runs on that machine any more: its jobs run again elsewhere.",
        ),
        Verb("up", "Start a server and a worker on this machine", "local:up", "kueue up", _fill_nothing),
        Verb(
            "down",
            "Stop the server and the worker of this machine",
            "local:down",
            "kueue down",
            _fill_nothing,
            "Running jobs go on.",
        ),
        Verb(
            "secret",
            "Change the shared secret while everything runs",
            "secret:secret",
            "kueue secret rotate",
            _fill_secret,
            "No job pauses.\n"
            "`rotate` writes a new secret into the settings file, keeps the old one beside it and prints\n"
            "what to do next; `reload` makes the server and the workers of this machine read the file\n"
            "again; `status` tells who still needs the old secret; `finish` gives it up.",
        ),
        Verb(
            "doctor",
            "Check this machine and say what to mend",
            "doctor.verb:doctor",
            "kueue doctor",
            _fill_doctor,
            "One line for each finding: ok, note, warning or problem, and what to type.\n"
            "Changes nothing, needs no server and no configuration. Exits with 1 if there is a problem.",
        ),
        Verb(
            "complete",
            "Print the completion script for a shell",
            "completion:complete",
            "kueue complete bash",
            _fill_complete,
            "With it TAB completes verbs, options, ids of jobs, and names of\n"
            'workers and resources. Put into ~/.bashrc: eval "$(kueue complete bash)"; zsh likewise.\n'
            "Into ~/.config/fish/config.fish: kueue complete fish | source",
        ),
        Verb("version", "Print the versions of command and server", "cluster:version", "kueue version", _fill_version),
    )
}
