"""Makes completions/ and kueue/cli/programs.json from the code: ``python tests/support/completions.py`` writes them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from kueue.cli import programs, shells  # noqa: E402  the path must be known first

LIST = "kueue/cli/programs.json"
MODULES = {
    "kueue_server": "kueue.server.main",
    "kueue_worker": "kueue.worker.main",
    "kueue_restart_workers": "kueue_ops.restart_workers",
    "kueue_install": "kueue_ops.install",
}


class Seen(BaseException):
    """A program is about to read its command line."""


def parser_of(module):
    """The parser with which a program's `main` reads its command line; None if the program is not there."""

    def stop(parser, *_):
        raise Seen(parser)

    if importlib.util.find_spec(module) is None:
        return None
    main = importlib.import_module(module).main
    kept = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = stop
    try:
        main([])
    except Seen as seen:
        return seen.args[0]
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = kept
    raise AssertionError(f"{module} did not read its command line")


def program_list():
    found = {}
    for name, module in MODULES.items():
        parser = parser_of(module)
        found[name] = [] if parser is None else programs.described(parser)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


FILES = {
    LIST: program_list,
    **{f"completions/{name}": (lambda shell=shell: shells.script(shell)) for shell, name in shells.FILES.items()},
}


if __name__ == "__main__":
    for file, text in FILES.items():
        (ROOT / file).parent.mkdir(exist_ok=True)
        (ROOT / file).write_text(text(), encoding="utf-8")
        print(file)
