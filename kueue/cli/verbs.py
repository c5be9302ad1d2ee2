"""The verbs of the command: what each is called, says of itself and takes.

Rules
- Nothing here touches the world, and only `argparse` is imported: completion needs this module at every TAB.
- A verb names the function that carries it out as ``module:function``; the module is loaded when the verb is used.
"""

from __future__ import annotations

import argparse

from kueue.errors import UserError
from kueue.units import merge_id_ranges, parse_duration, parse_id_ranges

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS, LOOK_PATIENCE_SECONDS = 30.0, 6.0
"""How long a verb waits for a server that is away: one that changes something outlasts a restart of the server, one
that only looks has nothing to lose by saying soon that there is nothing to see."""
LOOKING = frozenset({"list-jobs", "show-job", "list-workers", "show-worker", "list-resources", "log", "explain"})
ALSO_CALLED = {
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


def _ids(text: str) -> list[tuple[int, int]]:
    try:
        return parse_id_ranges(text)
    except UserError as error:
        is_word = text[:1].isalpha()
        hint = "Names are no ids: `kueue list-jobs` and `kueue list-workers` show the ids." if is_word else error.hint
        raise argparse.ArgumentTypeError(f"{error} {hint}") from error


def duration(text: str) -> float:
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
    add("--timeout", type=duration, metavar="DURATION", help="stop the job after this running time, like 90m or 2d")
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
        also = ", held ones included" if state == "pending" else ""
        one.add_argument(
            f"-{letter}",
            f"--{state}",
            action="append_const",
            dest="states",
            const=state,
            help=f"show {state} jobs{also}",
        )
    one.add_argument("--held", action="append_const", dest="states", const="held", help="show held jobs only")
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
