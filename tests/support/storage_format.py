"""The format of the state file, as text to compare and as a file to open.

``python -m tests.support.storage_format`` writes both for the format of this moment beside the others in
``tests/contract/data``. Run it when a change of facts, nouns or tables is meant:

- Before a format was released: look at the difference of its ``.txt`` and check the new files in.
- After it was released: never. Give `schema.FORMAT` the next number, add a step, and check in the files of that number.
  A new field with a default is the one exception: old rows read as before, so only the ``.txt`` is written anew
  (``--text``).
"""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from kueue.core import facts as f
from kueue.model import Canceled, Exited, Lost, NotStarted, Request, Signaled, TimedOut
from kueue.storage import rows, schema
from kueue.storage.opening import Host
from kueue.storage.sqlite import SqliteStore
from kueue.storage.store import Store
from tests.support.storage_rows import (
    OTHER_PLACE,
    WALL,
    answered,
    batch,
    cleaned,
    done,
    ending,
    finished,
    job_range,
    node_changed,
    offered,
    returned,
    started,
    stop_asked,
    submitted,
)

DATA = Path(__file__).parent.parent / "contract" / "data"

STORED: tuple[Any, ...] = (
    *get_args(f.AnyFact),
    f.Aggregates,
    rows.RangeBody,
    rows.FinishedBody,
    rows.Settings,
    rows.Place,
    rows.EndRecord,
)


class Told(msgspec.Struct):
    """All that a store tells of its record."""

    facts: list[f.AnyFact]
    finished: list[f.FinishedJob]
    aggregates: f.Aggregates
    events: list[tuple[float, str, str, int | None, int | None]]


def told(store: Store) -> Told:
    whole = [store.finished_job(row.id) for row in store.finished()]
    events = [(event.wall, event.who, event.what, event.job, event.last) for event in store.events()]
    return Told(list(store.replay()), [row for row in whole if row is not None], store.aggregates(), events)


def definition() -> str:
    """Tables and stored structs with their fields, one a line, sorted: whatever decides how a file reads."""
    structs: dict[str, list[str]] = {}
    for kind in STORED:
        _describe(inspect.type_info(kind), structs)
    lines = [f"application_id {schema.APPLICATION_ID:#x}", ""]
    lines += [" ".join(statement.split()) + ";" for statement in schema.TABLES.split(";") if statement.strip()]
    for name in sorted(structs):
        lines += ["", name, *structs[name]]
    return "\n".join(lines) + "\n"


def _describe(kind: inspect.Type, structs: dict[str, list[str]]) -> str:
    match kind:
        case inspect.StructType():
            name = kind.cls.__name__
            if name not in structs:
                structs[name] = []
                shape = "array" if kind.array_like else "object"
                structs[name].append(f"    as {shape}, tag {kind.tag_field!r} {kind.tag!r}")
                for field in kind.fields:
                    default = "" if field.required else f" = {field.default!r}"
                    text = _describe(field.type, structs)
                    structs[name].append(f"    {field.encode_name}: {text}{default}")
            return name
        case inspect.UnionType():
            return " | ".join(sorted(_describe(entry, structs) for entry in kind.types))
        case inspect.LiteralType():
            return f"one of {sorted(kind.values)}"
        case inspect.TupleType():
            return f"({', '.join(_describe(entry, structs) for entry in kind.item_types)})"
        case inspect.VarTupleType():
            return f"[{_describe(kind.item_type, structs)}]"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def fill(store: Store) -> None:
    """Something of everything that a record can hold."""
    store.commit(
        batch(
            node_changed(1),
            node_changed(2, name="ralab02", offline=True),
            submitted(1, job_range(4), job_range(held=True, place=OTHER_PLACE, request=Request(3, 2, 512, True, True))),
            submitted(6, job_range(argvs=(("./a",), ("./b", "ü")))),
            *(submitted(job) for job in range(8, 15)),
            answered(1),
        )
    )
    store.commit(batch(offered(1, 1), started(1, 1), offered(2, 2, node=2), offered(8, 3), returned(8, 3)))
    store.commit(
        batch(
            f.JobHeld(job=9, principal="operator", wall=WALL),
            f.JobReleased(job=9, principal="operator", wall=WALL),
            offered(9, 4),
            f.OfferOverdue(job=9, offer=4, wall=WALL),
            f.AttemptSilenced(job=9, offer=4, wall=WALL),
            f.AttemptReturned(job=9, offer=4, started_wall=WALL, wall=WALL),
            f.AttemptLost(job=9, offer=4, reason="the machine was started anew", wall=WALL),
            offered(9, 5),
            f.AttemptSuperseded(job=9, offer=4, text="exited with code 0", wall=WALL),
            stop_asked(9),
            f.StopDropped(job=9, offer=5, started_wall=WALL, wall=WALL),
            stop_asked(1),
        )
    )
    ends = {3: Exited(0), 6: Exited(3), 10: Signaled(11), 11: NotStarted("no such directory", "directory")}
    ends |= {12: TimedOut(60.0), 13: Canceled("not needed"), 14: Lost("given away three times")}
    store.commit(
        batch(
            *(done(job, outcome, by="operator" if job == 13 else "") for job, outcome in ends.items()),
            finished=tuple(finished(job, outcome) for job, outcome in ends.items()),
        )
    )
    store.commit(ending(4, place=OTHER_PLACE))
    store.commit(
        batch(
            cleaned(3),
            f.NumbersRaised(next_job=40, next_offer=60, wall=WALL),
            f.TimeoutChanged(seconds=30.0, wall=WALL),
            timeout_seconds=30.0,
            never_given=((20, 59),),
            next_job=40,
            next_offer=60,
            next_node=3,
            succeeded=1,
            failed=4,
            canceled=1,
            run_seconds=10,
            submitted_total=14,
            succeeded_total=2,
            failed_total=5,
            canceled_total=1,
            lost_attempts_total=1,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true", help="write the .txt alone")
    is_text: bool = parser.parse_args().text
    DATA.mkdir(parents=True, exist_ok=True)
    name = DATA / f"format-{schema.FORMAT}"
    name.with_suffix(".txt").write_text(definition())
    if is_text:
        return
    path = name.with_suffix(".sqlite")
    path.unlink(missing_ok=True)
    store = SqliteStore(path, host=Host("example", ""), wall=lambda: WALL, ballast_bytes=4096)
    fill(store)
    store.release_ballast()
    name.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(told(store)), indent=1))
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


if __name__ == "__main__":
    main()
