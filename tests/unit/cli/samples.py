"""Answers of a server, as they travel, for the tests of listings; noon is the moment they are looked at."""

from __future__ import annotations

from kueue.model import (
    EndRecord,
    Excerpt,
    Exited,
    MachineInfo,
    MachineLoad,
    MachineTotals,
    Payload,
    Place,
    Request,
    Terms,
)
from kueue.protocol.messages import AttemptRow, JobDetail, JobRow, WorkerRow

NOON = 1_709_467_200.0  # 2024-03-03 12:00:00 UTC


def job(number, argv, state, **more):
    cores, ram_mb, counters = more.pop("cores", 8), more.pop("ram_mb", 8192), more.pop("counters", ())
    return JobRow(
        id=number,
        state=state,
        payload=more.pop("payload", Payload(tuple(argv))),
        cwd=more.pop("cwd", "/home/ann/proj"),
        request=more.pop("request", Request(cores=cores, ram_mb=ram_mb, counters=counters)),
        issued_wall=more.pop("issued_wall", NOON),
        **more,
    )


MAKE = job(
    0,
    ["make", "-j", "8"],
    "succeeded",
    counters=(("genus", 1), ("primelib", 4)),
    worker="ralab04",
    started_wall=NOON - 100,
    ended_wall=NOON - 90,
    run_seconds=10.4,
    return_code=0,
    outcome=Exited(0),
    attempt=1,
)
JOBS = (
    MAKE,
    job(1, ["./my_script.py"], "failed", worker="ralab04", run_seconds=20.0, return_code=2, outcome=Exited(2)),
    job(2, ["sleep", "600"], "running", cores=2, ram_mb=100, worker="rax11", started_wall=NOON - 30),
    job(3, ["true"], "pending"),
)
COUNTS = (("pending", 1), ("running", 1), ("succeeded", 1), ("failed", 1), ("canceled", 0), ("offered", 0))

FINISHED = JobDetail(
    row=job(
        7,
        ["make", "-j", "8"],
        "succeeded",
        counters=(("genus", 1),),
        worker="ralab04",
        issued_wall=NOON - 86400,
        started_wall=NOON - 3600,
        ended_wall=NOON - 3590,
        run_seconds=10.0,
        return_code=0,
        outcome=Exited(0),
        attempt=1,
    ),
    place=Place("/home/ann/proj"),
    terms=Terms(),
    principal="operator",
    comment="Job finished orderly.",
    attempts=(AttemptRow(number=1, offer=3, worker="ralab04", offered_wall=NOON - 3601, started_wall=NOON - 3600),),
    end=EndRecord(
        Exited(0),
        NOON - 3600,
        NOON - 3590,
        10.0,
        stdout=Excerpt(size=6, head=b"hello\n"),
        stderr=Excerpt(size=2000, head=b"begin\n", tail=b"ok\xffok \x1b[31mend\n"),
    ),
)

WORKERS = (
    WorkerRow(
        id=0,
        name="ralab04",
        state="online",
        connected_wall=NOON - 90_000,
        updated_wall=NOON - 5,
        info=MachineInfo("6.1.0", "Debian GNU/Linux 12", 4131),
        totals=MachineTotals(10, 32, 64046),
        load=MachineLoad((17.6, 18.9, 19.6)),
        free_slots=8,
        free_cores=12,
        free_ram_mb=30000,
        occupation=0.625,
        running=(3, 4),
    ),
    WorkerRow(
        id=12,
        name="rax11",
        state="offline",
        connected_wall=NOON - 60,
        updated_wall=NOON - 60,
        info=MachineInfo("5.14", "Rocky Linux 9", 900),
        totals=MachineTotals(10, 4, 8000),
        load=MachineLoad((0.0, 3.1, 10.0)),
        free_slots=10,
        free_cores=4,
        free_ram_mb=8000,
        offered=(5,),
    ),
)
