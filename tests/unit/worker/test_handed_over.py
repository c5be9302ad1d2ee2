"""What was handed to runners: when an attempt that a runner does not name is gone, and when it is not."""

from __future__ import annotations

from kueue.worker.handed_over import Handed, HandedOver
from kueue.worker.orders import Attached, AttemptState, Gone, Queued, Refused, StartAttempt
from kueue.worker.runner_disk import start_records


def state(offer=5, word="running"):
    return AttemptState(offer=offer, job=offer, queue_id="q", state=word, started_wall=1.0)


def attached(*states):
    return Attached(protocol=1, version="1", runner="new", pid=1, attempts=states)


def test_what_a_runner_was_given_and_does_not_name_at_its_attachment_is_gone():
    handed = HandedOver({5: Handed(state(), "new")})
    assert [type(event) for event in handed.counted("new", attached(), is_first=True)] == [Gone]
    assert handed == {}


def test_an_orphan_is_not_gone_because_its_new_runner_does_not_name_it():
    handed = HandedOver({5: Handed(state(), "new", is_orphan=True)})
    assert handed.counted("new", attached(), is_first=True) == []
    assert handed.counted("new", attached(), is_first=False) == []
    assert list(handed) == [5]


def test_an_orphan_that_is_named_is_none_any_more():
    handed = HandedOver({5: Handed(state(), "dead", is_orphan=True)})
    handed.counted("new", attached(state(5, "stopping")), is_first=False)
    assert (handed[5].runner, handed[5].is_orphan, handed[5].state.state) == ("new", False, "stopping")


def test_an_orphan_that_nobody_named_is_gone_unless_there_is_a_record_of_it():
    order = StartAttempt(offer=7, job=7, queue_id="q", argv=("true",), env=(), cwd="/")
    orphans = [
        Handed(state(5), "new", is_orphan=True),
        Handed(state(6), "new", is_orphan=True),
        Handed(state(7, "queued"), "new", start=order, is_orphan=True),
        Handed(state(8), "new"),
    ]
    handed = HandedOver({one.state.offer: one for one in orphans})
    told = handed.left_over(orphans, [(5, {"runner": "slow"})])
    assert [(type(event), event.offer) for event in told] == [(Gone, 6), (Refused, 7)]
    assert list(handed) == [5, 8]
    assert handed.left_over(orphans, []) == [
        Gone(offer=5, job=5, queue_id="q", reason="its runner has no record of it")
    ]


def test_what_waits_at_a_runner_is_what_it_said_it_has_wait():
    order = StartAttempt(offer=2, job=2, queue_id="q", argv=("true",), env=(), cwd="/")
    handed = HandedOver({offer: Handed(state(offer, "queued"), "new", start=order) for offer in (2, 3)})
    handed[4] = Handed(state(4, "queued"), "old")
    handed[5] = Handed(state(5), "new")
    handed.heard(Queued(offer=3))
    assert handed.waiting("new") == (3,)


def test_dead_runners_are_those_with_records_that_nobody_has():
    handed = HandedOver({5: Handed(state(), "new")})
    records = [(5, {"runner": "dead"}), (6, {"runner": "dead"}), (7, {"runner": "alive"})]
    assert handed.dead(lambda name: name == "alive", records) == ["dead"]


def test_what_is_no_whole_record_tells_of_no_attempt(tmp_path):
    whole = b'{"job": 1, "queue_id": "q", "runner": "r"}'
    for offer, text in enumerate([b"", b"[]", b"{}", b'{"job": 1', whole]):
        (tmp_path / str(offer)).mkdir()
        (tmp_path / str(offer) / "start.json").write_bytes(text)
    assert [offer for offer, _ in start_records(tmp_path)] == [4]
