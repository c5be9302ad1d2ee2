"""What a runner is told to start."""

from __future__ import annotations

from kueue.model import Allocation, Payload, Place, Raw, Request, Share, Terms, from_os_text, to_os_text
from kueue.protocol.messages import Offer
from kueue.worker.environment import additions
from kueue.worker.known import Memo, read_memo
from kueue.worker.start_order import StartOrders

SHARE = Share(node=1, slots=2, cores=3, ram_mb=4, named=(("gpu", (1,)),))
BASE = {"PATH": "/bin", "A": "1", "ODD": "\udcff", "N\udcff": "x"}


def make(orders, *env):
    offer = Offer(
        offer=9,
        job=7,
        attempt=2,
        payload=Payload(argv=("true", Raw("/w=="))),
        place=Place(cwd="/tmp", pwd="/t", env=env, umask=0o77),
        request=Request(),
        terms=Terms(timeout_seconds=5.0, on_lost="wait"),
        allocation=Allocation((SHARE,)),
    )
    return offer, orders.make(offer, "queue", SHARE, Memo(SHARE, "wait", "/tmp"), grace_seconds=3.0, nice=4)


def test_the_environment_is_that_of_the_job_also_after_other_jobs():
    orders = StartOrders(BASE, "lab1")
    make(orders, ("A", "of another job"), ("B", "of another job"))
    offer, order = make(orders, ("A", "2"), (to_os_text("Z\udcfe"), "z"))
    told = {from_os_text(name): from_os_text(value) for name, value in order.env}
    assert told == {**BASE, **additions(offer, SHARE, "lab1")}
    assert len(order.env) == len(told)
    assert dict(order.env)["ODD"] == Raw("/w==")


def test_what_the_offer_says_is_what_the_runner_is_told():
    _, order = make(StartOrders(BASE, "lab1"))
    assert (order.offer, order.job, order.queue_id) == (9, 7, "queue")
    assert (order.argv, order.cwd, order.pwd, order.umask) == (("true", Raw("/w==")), "/tmp", "/t", 0o77)
    assert (order.timeout_seconds, order.on_lost, order.grace_seconds, order.nice) == (5.0, "wait", 3.0, 4)
    assert read_memo(order.memo) == Memo(SHARE, "wait", "/tmp")
