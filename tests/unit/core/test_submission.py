"""What is refused at the door, in the documented order and words."""

from __future__ import annotations

import pytest

from kueue.core import submission
from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.model import JobRange, Now, Payload, Place, Raw, Request, Terms
from kueue.protocol import messages as m

NOW = Now(wall=1000.0, steady=0.0)


def submit(request: Request, *, counters: dict[str, int] | None = None, **fields: object) -> m.Message:
    settings = Settings(global_max_parallel_jobs=3, counters=counters or {})
    engine = Engine(settings, queue_id="q")
    values: dict[str, object] = {"payload": Payload(argv=("true",)), "place": Place(cwd="/d")}
    entry = JobRange(**{**values, "request": request, **fields})  # type: ignore[arg-type]
    turn = engine.handle(1, m.Submit(seq=9, request_id="r", ranges=(entry,)), NOW)
    ((session, answer),) = turn.sends
    assert session == 1
    assert answer.seq == 9  # type: ignore[attr-defined]
    assert isinstance(answer, m.Submitted) == bool(engine.state.jobs)
    assert isinstance(answer, m.Submitted) or not turn.facts
    return answer


def refusal(request: Request, **fields: object) -> str:
    answer = submit(request, **fields)  # type: ignore[arg-type]
    assert isinstance(answer, m.Failed)
    assert answer.error.startswith("Job rejected by server: ")
    return answer.error.removeprefix("Job rejected by server: ")


def test_more_slots_than_the_cap_are_refused_first():
    request = Request(slots=4, counters=(("foo", 1),))
    assert refusal(request) == (
        "Job requires more slots than the server will allow at once! See global_max_parallel_jobs setting in config."
    )


def test_resources_without_any_configured_are_refused():
    request = Request(counters=(("genus", 1), ("primelib", 4)))
    assert refusal(request) == (
        "No global resources configured on the server! Requested resources: {genus=1, primelib=4}"
    )


def test_an_unknown_resource_is_refused_by_name():
    request = Request(counters=(("foo", 1),))
    assert refusal(request, counters={"genus": 3}) == "Required resource not configured on server: foo"


def test_the_refusal_of_an_unknown_resource_says_where_it_is_configured():
    answer = submit(Request(counters=(("foo", 1),)), counters={"genus": 3, "a": 1})
    assert isinstance(answer, m.Failed)
    assert "[global_resources]" in answer.hint
    assert "foo = 3" in answer.hint
    assert "Configured: a, genus." in answer.hint
    none = submit(Request(counters=(("foo", 1),)))
    assert isinstance(none, m.Failed)
    assert "None is configured." in none.hint
    other = submit(Request(counters=(("genus", 9),)), counters={"genus": 3})
    assert isinstance(other, m.Failed)
    assert other.hint == ""


def test_too_many_of_a_resource_are_refused_with_the_limit():
    request = Request(counters=(("genus", 4),))
    expected = "Required resource exceeds limits configured on the server: max. genus=3"
    assert refusal(request, counters={"genus": 3}) == expected


def test_resources_are_looked_at_in_the_order_of_their_names():
    request = Request(counters=(("a", 9), ("b", 1)))
    assert refusal(request, counters={"a": 1, "c": 1}).endswith("max. a=1")


@pytest.mark.parametrize(
    "request_",
    [
        Request(named=(("gpu", 1), ("gpu", 1))),
        Request(named=(("gpu", 1), ("fpga", 1))),
        Request(counters=(("genus", 1), ("genus", 3))),
    ],
)
def test_a_resource_named_twice_or_out_of_order_is_refused(request_):
    assert "sorted by name" in refusal(request_, counters={"genus": 3})


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (Request(cores=-1), {}),
        (Request(named=(("gpu", -1),)), {}),
        (Request(ram_mb=1 << 53), {}),
        (Request(counters=(("@slots", 1),)), {}),
        (Request(), {"count": 0}),
        (Request(), {"count": -1}),
        (Request(), {"count": submission.MAX_JOBS_AT_ONCE + 1}),
        (Request(), {"payload": Payload(argv=())}),
        (Request(), {"argvs": (("a",), ())}),
        (Request(), {"terms": Terms(max_attempts=0)}),
        (Request(), {"terms": Terms(timeout_seconds=0.0)}),
        (Request(), {"terms": Terms(timeout_seconds=1e300)}),
        (Request(), {"terms": Terms(max_attempts=1 << 53)}),
        (Request(priority=10**25), {}),
        (Request(priority=-(10**25)), {}),
        (Request(), {"place": Place(cwd="")}),
        (Request(), {"place": Place(cwd="d")}),
        (Request(), {"place": Place(cwd="/d\0e")}),
        (Request(), {"place": Place(cwd="/d", umask=0o1000)}),
        (Request(), {"place": Place(cwd="/d", umask=-1)}),
        (Request(), {"place": Place(cwd="/d", env=(("A=B", "c"),))}),
        (Request(), {"place": Place(cwd="/d", env=(("", "c"),))}),
        (Request(), {"place": Place(cwd="/d", env=(("A", "b"), ("A", "c")))}),
        (Request(), {"place": Place(cwd="/d", env=(("A", "b\0"),))}),
        (Request(), {"payload": Payload(argv=("a\0",))}),
        (Request(), {"payload": Payload(argv=(Raw("AP8="),))}),
        (Request(), {"payload": Payload(argv=("a",), stdout="\0")}),
        (Request(), {"argvs": (("a",), ("b\0",))}),
    ],
)
def test_nonsense_is_refused_and_uses_no_id(request_, fields):
    assert refusal(request_, **fields)


def test_all_argument_lists_become_jobs():
    answer = submit(Request(), argvs=(("a",), ("b",), ("c",)))
    assert isinstance(answer, m.Submitted)
    assert answer.ids == ((0, 2),)
