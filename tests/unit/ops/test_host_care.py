"""The care for many hosts at once, with hands in the place of ssh that do what they are told."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest

from kueue_ops.address import HostAddress
from kueue_ops.host_care import HostCare
from kueue_ops.lanes import Lanes, Ticket
from kueue_ops.restart_decision import Limits
from kueue_ops.sight import HostSight, ScreenSession, ServerWord, Trouble, WorkerSight
from kueue_ops.trouble import HostTrouble

LIMITS = Limits()


class Report(msgspec.Struct, frozen=True):
    noted: tuple[str, ...] = ()


class Machine:
    """A host: a worker of some version, or none; the version that is installed; what goes wrong there."""

    def __init__(self, name: str, running: str = "1.0", installed: str = "1.0") -> None:
        self.name = name
        self.running = running
        self.installed = installed
        self.trouble: dict[str, Trouble] = {}
        self.done: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.closed = threading.Event()
        self.noted: tuple[str, ...] = ()

    def _meets(self, what: str) -> None:
        if what in self.gates:
            self.gates[what].wait(30)
        if what in self.trouble:
            raise HostTrouble(self.trouble[what])

    def look(self) -> HostSight:
        self._meets("look")
        return HostSight(
            host_name=self.name,
            boot_id="boot",
            sessions=(ScreenSession(7, is_dead=False),) if self.running else (),
            has_screen=True,
            command="kueue_worker",
            version=self.installed,
            worker_name=self.name,
            worker_pid=17 if self.running else None,
            worker_version=self.running,
            noted=self.noted,
        )

    def start(self, _):
        self._meets("start")
        self.done.append("start")
        self.running = self.installed
        return Report()

    def renew(self, _):
        self._meets("renew")
        self.done.append("renew")
        self.running = self.installed
        return Report()

    def close(self):
        self.closed.set()


class Farm:
    """Machines, and a server that sees what runs there."""

    def __init__(self, *machines: Machine, limits: Limits = LIMITS) -> None:
        self.machines = {machine.name: machine for machine in machines}
        self.hurried: list[str] = []
        self.is_up = True
        self.care = HostCare(
            {name: HostAddress(name, None, name) for name in self.machines},
            self,
            self.reach,
            limits=limits,
            hurry=self.hurried.append,
        )

    @contextmanager
    def reach(self, address, _ticket):
        self.machines[address.host]._meets("connect")
        yield self.machines[address.host]

    def word(self, name):
        machine = self.machines[name]
        worker = WorkerSight(name, is_alive=bool(machine.running), version=machine.running)
        return ServerWord(is_reached=self.is_up, worker=worker if self.is_up else None)

    def check(self, name):
        return self.care.check(name, Ticket(name, 60))


@pytest.fixture
def log():
    """The lines that the tool says."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger, keep = logging.getLogger("kueue.restart"), Keep()
    before = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(keep)
    logger.setLevel(before)


def test_a_host_without_a_worker_gets_one_and_is_looked_at_again_soon(log):
    farm = Farm(Machine("a", running=""))
    assert farm.check("a") == LIMITS.confirm_seconds
    assert farm.machines["a"].done == ["start"]
    assert not farm.care.status("a").is_settled
    assert farm.check("a") is None
    status = farm.care.status("a")
    assert (status.has_worker, status.is_settled, status.last_action, status.server) == (True, True, "started", "alive")
    assert [line.split()[0] for line in log] == ["WARNING", "INFO", "INFO"]


def test_trouble_is_said_in_full_once_and_then_short(log):
    machine = Machine("a")
    machine.trouble["connect"] = Trouble("refused", "a: nobody listens on port 22.", "Start sshd there.")
    farm = Farm(machine)
    for _ in range(3):
        assert farm.check("a") is None
    assert log == [
        "ERROR host=a nobody listens on port 22. Start sshd there.",
        "WARNING host=a nobody listens on port 22.",
        "WARNING host=a nobody listens on port 22.",
    ]
    del machine.trouble["connect"]
    farm.check("a")
    assert log[-1] == "INFO host=a worker=a Its worker is up."


def test_a_remark_about_a_host_is_made_once(log):
    machine = Machine("a")
    machine.noted = ("no screen there",)
    farm = Farm(machine)
    for _ in range(3):
        farm.check("a")
    assert len([line for line in log if "no screen" in line]) == 1


def test_a_start_that_fails_is_said_with_its_reason_and_tried_again_later(log):
    machine = Machine("a", running="")
    machine.trouble["start"] = Trouble("disk", "The disk there is full.", "Make room.")
    farm = Farm(machine)
    assert 50 < farm.check("a") <= 60
    assert "The disk there is full. Make room." in log[-1]
    status = farm.care.status("a")
    assert (status.last_action, status.is_settled, status.has_worker) == ("not started", True, False)
    assert 50 < farm.check("a") <= 60
    assert machine.done == []


def test_only_one_of_many_hosts_is_renewed_at_a_time_and_all_in_the_end():
    farm = Farm(*(Machine(f"h{index}", running="0.9") for index in range(6)))
    hold = {name: threading.Event() for name in farm.machines}
    for name, machine in farm.machines.items():
        machine.gates["renew"] = hold[name]
    lanes = Lanes(6, 60)
    done: list[str] = []
    for name in farm.machines:
        lanes.submit(name, lambda ticket: farm.care.check(ticket.key, ticket), lambda result: done.append(result.key))
    until(lambda: len(done) == 5)
    (first,) = set(farm.machines) - set(done)
    assert all(farm.care.status(name).has_worker for name in farm.machines)
    hold[first].set()
    until(lambda: len(done) == 6)
    assert farm.hurried == []
    farm.check(first)
    order = [first]
    while len(order) < 6:
        assert len(farm.hurried) == len(order)
        name = farm.hurried[-1]
        assert name not in order
        hold[name].set()
        farm.check(name)
        assert farm.machines[name].done == ["renew"]
        assert sum(bool(machine.done) for machine in farm.machines.values()) == len(order) + 1
        farm.check(name)
        order.append(name)
    assert {machine.running for machine in farm.machines.values()} == {"1.0"}


def test_a_version_that_fails_on_the_first_host_is_not_tried_on_the_others():
    farm = Farm(Machine("a", running="0.9"), Machine("b", running="0.9"))
    farm.machines["a"].trouble["renew"] = Trouble("died", "The worker ended at once.")
    farm.check("a")
    farm.machines["a"].running = ""
    farm.check("a")
    assert farm.check("b") is None
    assert farm.machines["b"].done == []
    status = farm.care.status("b")
    assert (status.has_worker, status.is_settled) == (True, True)
    assert "did not come up on a" in status.more


def test_a_look_that_hangs_is_a_trouble_and_its_connection_is_closed(log):
    machine = Machine("a")
    machine.gates["look"] = threading.Event()
    farm = Farm(machine)
    (result,) = Lanes(1, 0.2).each(["a"], lambda ticket: farm.care.check(ticket.key, ticket))
    assert result.is_hung
    farm.care.hung("a")
    assert machine.closed.wait(20)
    assert farm.care.status("a").action == "trouble"
    assert "ERROR host=a" in log[-1]
    machine.gates.pop("look").set()


def test_a_look_that_comes_back_too_late_starts_nothing():
    machine = Machine("a", running="")
    gate = machine.gates["look"] = threading.Event()
    farm = Farm(machine)
    lanes = Lanes(1, 0.2)
    (result,) = lanes.each(["a"], lambda ticket: farm.care.check(ticket.key, ticket))
    assert result.is_hung
    gate.set()
    until(lambda: lanes.lingering == 0)
    assert machine.done == []


def test_a_host_that_left_the_settings_is_not_touched():
    farm = Farm(Machine("a", running=""))
    farm.care.addresses = {}
    assert farm.check("a") is None
    assert farm.machines["a"].done == []


def test_a_fault_of_our_own_is_logged_with_its_place_and_is_a_line_of_the_host(log):
    farm = Farm(Machine("a"))
    farm.care.failed("a", ValueError("odd"))
    assert "fault in kueue itself" in log[0]
    assert farm.care.status("a").action == "trouble"


def until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_look_that_hangs_before_it_is_connected_closes_no_connection_of_an_earlier_one():
    farm = Farm(Machine("a"))
    farm.care.check("a", Ticket("a", 30.0))
    assert not farm.care._open
