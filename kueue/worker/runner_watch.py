"""Which runners answer, and what is said of one that does not: by it, no job of its is told of any more.

Rules
- Only one that has something in its care is asked, again and again; one without may sleep.
- One that does not answer is told of once: in the log, at ``kueue_worker --status``, and to the server for each attempt
  that it has. That is no proof of anything: it lives, and so may they.
- A worker that was stopped itself, or slept with its machine, finds answers that came long ago; they are read before
  anybody is called mute.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from kueue import threads
from kueue.worker.handed_over import HandedOver
from kueue.worker.one_runner import Runner
from kueue.worker.orders import News, Ping, RunnerAnswers, RunnerMute
from kueue.worker.runner_disk import RunnerDisk

log = logging.getLogger(__name__)

SECOND_LOOK_SECONDS = 0.5


class RunnerWatch:
    """Over all runners of a worker. `publish`: tells the agent; `on_trouble`: a sentence for people, empty: none."""

    def __init__(
        self,
        handed: HandedOver,
        disk: RunnerDisk,
        answer_seconds: float,
        publish: Callable[[News], Awaitable[None]],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._handed = handed
        self._disk = disk
        self._answer_seconds = answer_seconds
        self._publish = publish
        self._on_trouble = on_trouble
        self._mute: dict[str, int | None] = {}
        """Runner → pid of its keeper, if that is known."""

    async def over(self, runner: Runner) -> None:
        """Asks now and then, until it is dead or dismissed."""
        while not (runner.is_dead or runner.is_dismissed):
            if not self._handed.cares(runner.id):
                await runner.stirred.wait()  # the lease alone comes every few seconds
                continue
            await trio.sleep(self._answer_seconds)
            if not self._handed.cares(runner.id) or runner.connection is None:
                continue
            if runner.asked_at is None:
                runner.asked_at = trio.current_time()
                await runner.tell(Ping())
            elif not runner.is_well(self._answer_seconds):
                await trio.sleep(SECOND_LOOK_SECONDS)
                if not runner.is_well(self._answer_seconds) and runner.connection is not None:
                    await self.is_mute(runner)

    async def is_mute(self, runner: Runner) -> None:
        """It lives and does not answer; said once."""
        if runner.id in self._mute:
            return
        pid = self._mute[runner.id] = runner.keeper
        if pid is None:  # it has never answered us
            with trio.move_on_after(SECOND_LOOK_SECONDS):  # a dead disk is a reason to be mute
                pid = await threads.patiently(self._disk.keeper, runner.id, abandon_on_cancel=True)
            if runner.id not in self._mute:
                return
            self._mute[runner.id] = pid
        hint = (
            f"if somebody stopped it, `kill -CONT {pid}` lets it go on; `kill -9 {pid}` has another process take its "
            "place. Its jobs outlive both"
            if pid
            else "its log beside the spool may say why"
        )
        log.warning(
            "%s: until it does, nobody knows how its jobs end; new ones go to another; %s",
            _said(f"the runner {runner.id}", pid),
            hint,
        )
        self._on_trouble(self.trouble)
        await self._publish(RunnerMute(offers=self._left(runner), note=self.trouble))

    async def answers(self, runner: Runner) -> None:
        """Something came from it."""
        runner.asked_at = None
        runner.answers = True
        if runner.id in self._mute:
            log.info("the runner %s answers again", runner.id)
            await self._is_not_mute(runner, self._left(runner))

    async def is_dead(self, runner: Runner) -> None:
        """Nothing is to be heard from it any more; what it had is another matter."""
        if runner.id in self._mute:
            await self._is_not_mute(runner, ())

    async def _is_not_mute(self, runner: Runner, offers: tuple[int, ...]) -> None:
        del self._mute[runner.id]
        self._on_trouble(self.trouble)
        await self._publish(RunnerAnswers(offers=offers, note=self.trouble))

    def _left(self, runner: Runner) -> tuple[int, ...]:
        """Also a start of which nothing was heard: the remark answers its offer, so that the worker gets other jobs. To
        withdraw it would not help the job, of which only that runner can say whether it has begun.
        """
        return tuple(one.state.offer for one in self._handed.of(runner.id) if not one.is_over)

    @property
    def trouble(self) -> str:
        """What is said of all of them; empty: each answers."""
        return "; ".join(_said("a runner", pid) for pid in self._mute.values())


def _said(who: str, pid: int | None) -> str:
    return f"{who}{f' (pid {pid})' if pid else ''} does not answer"
