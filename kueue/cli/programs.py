"""The command lines of the other programs, for completion: read from a list, because their modules load slowly.

The list is made from their parsers by ``python tests/support/completions.py``; a test holds the two together.
"""
# ruff: noqa: PTH120, PTH123 - pathlib takes 5 ms to import

from __future__ import annotations

import argparse
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROGRAMS = ("kueue_server", "kueue_worker", "kueue_restart_workers", "kueue_install")
LIST = f"{os.path.dirname(__file__)}/programs.json"


def described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """What the list holds of a parser: an entry for each argument, those of subcommands among them."""
    found: list[dict[str, Any]] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            found.append({"names": [], "metavar": "", "nargs": None, "choices": list(action.choices), "help": ""})
            for one in action.choices.values():
                found += [entry for entry in described(one) if entry not in found]
        elif action.help != argparse.SUPPRESS:
            found.append(
                {
                    "names": list(action.option_strings),
                    "metavar": action.metavar if isinstance(action.metavar, str) else "",
                    "nargs": action.nargs,
                    "choices": None if action.choices is None else [str(one) for one in action.choices],
                    "help": " ".join((action.help or "").split()),
                }
            )
    return found


def parser(name: str) -> argparse.ArgumentParser:
    """A parser that takes what the program takes, and does nothing with it."""
    import json  # noqa: PLC0415 - most presses of TAB are about `kueue` itself

    with open(LIST, encoding="utf-8") as file:
        entries = json.load(file).get(name, [])
    made = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)
    for number, entry in enumerate(entries):
        more = {} if entry["choices"] is None else {"choices": entry["choices"]}
        if not entry["names"]:
            # An argument of a subcommand: how many there are depends on which, so that any number will do.
            made.add_argument(
                f"value_{number}", nargs="?" if entry["choices"] else "*", metavar=entry["metavar"], **more
            )
        elif entry["nargs"] == 0:
            made.add_argument(*entry["names"], action="store_true", help=entry["help"])
        else:
            made.add_argument(
                *entry["names"], metavar=entry["metavar"], nargs=entry["nargs"], help=entry["help"], **more
            )
    return made
