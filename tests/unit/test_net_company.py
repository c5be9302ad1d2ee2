"""Messages that can wait go with the next ones, and alone when none come."""

import pytest
import trio
import trio.testing

from kueue import net
from kueue.protocol import codec
from kueue.protocol.messages import AttemptStarted, Heartbeat

pytestmark = pytest.mark.trio


def started(offer):
    return AttemptStarted(offer=offer, started_wall=1.0)


class Counting(trio.abc.SendStream):
    """Keeps what was sent with each call."""

    def __init__(self):
        self.pieces = []

    async def send_all(self, data):
        await trio.lowlevel.checkpoint()
        self.pieces.append(codec.from_worker.decode_all(codec.FrameReader(1 << 20).feed(data)))

    async def wait_send_all_might_not_block(self):
        await trio.lowlevel.checkpoint()

    async def aclose(self):
        await trio.lowlevel.checkpoint()


async def test_what_can_wait_goes_with_what_cannot(autojump_clock):
    sending = Counting()
    stream = trio.StapledStream(sending, trio.testing.MemoryReceiveStream())
    async with net.messages_over(stream, codec.to_worker, name="server") as messages:
        messages.put([started(1)], can_wait=True)
        messages.put([started(2)], can_wait=True)
        await trio.sleep(net.COMPANY_SECONDS / 2)
        assert sending.pieces == []
        begin = trio.current_time()
        messages.put([Heartbeat(number=1)])
        await messages.drained()
        assert trio.current_time() == begin
        assert sending.pieces == [[started(1), started(2), Heartbeat(number=1)]]


async def test_what_nothing_follows_goes_alone_and_soon(autojump_clock):
    sending = Counting()
    stream = trio.StapledStream(sending, trio.testing.MemoryReceiveStream())
    async with net.messages_over(stream, codec.to_worker, name="server") as messages:
        messages.put([Heartbeat(number=1)])
        await messages.drained()
        begin = trio.current_time()
        messages.put([started(1)], can_wait=True)
        await messages.drained()
        assert trio.current_time() - begin == pytest.approx(net.COMPANY_SECONDS)
        assert sending.pieces == [[Heartbeat(number=1)], [started(1)]]
