"""What waits at the desk is served, and what goes wrong with it is the asker's alone."""

from __future__ import annotations

import pytest

from kueue.core.engine import Engine
from kueue.core.settings import Settings
from kueue.model import Now
from kueue.server.desk import Desk

pytestmark = pytest.mark.trio


async def test_a_look_that_meets_a_bug_fails_for_who_asked_and_the_next_is_served():
    desk, engine = Desk(), Engine(Settings(), queue_id="queue", version="1")
    broken = desk.look(lambda *_: {}["x"])
    well = desk.look(lambda engine, _: engine.queue.settings)
    desk.serve_looks(engine, lambda: Now(0.0, 0.0))
    with pytest.raises(KeyError):
        await broken.result()
    assert await well.result() == Settings()
