"""One connection to one runner: orders out, events in, each a line of JSON.

Rules
- Whoever serves the socket must be of our own uid.
- All orders that wait are written with one call, at once if the socket takes them; a runner that takes nothing for a
  while loses the connection: half a line may be sent, so it is of no more use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import trio

from kueue.worker.orders import Event, Order

LINE_BYTES = 64 * 1024 * 1024
READ_BYTES = 256 * 1024

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Mute(Exception):
    """The runner did not answer in time, or ended the connection."""


class Attachment:
    """Made by `attach`. `patience_seconds`: how long a write may take."""

    def __init__(self, stream: trio.SocketStream, patience_seconds: float) -> None:
        self._stream = stream
        self._patience_seconds = patience_seconds
        self._waiting = bytearray()
        self._writing = trio.Lock()

    def put(self, order: Order) -> None:
        """To be written with the next `flush`."""
        _encoder.encode_into(order, self._waiting, -1)
        self._waiting += b"\n"

    def write_some(self) -> bool:
        """Write what the socket takes at once, nearly always all. False: somebody has to `flush` the rest."""
        if self._waiting and not self._writing.locked():
            # A turn of the loop would cost more than the write.
            with contextlib.suppress(OSError):
                del self._waiting[: os.write(self._stream.socket.fileno(), self._waiting)]
        return not self._waiting or self._writing.locked()

    async def flush(self) -> None:
        """Returns when all that was put is written, or the connection is broken: its reader sees the same."""
        self.write_some()
        if not self._waiting:
            return
        async with self._writing:
            while self._waiting:
                data, self._waiting = self._waiting, bytearray()
                try:
                    with trio.move_on_after(self._patience_seconds) as limit:
                        await self._stream.send_all(data)
                    if limit.cancelled_caught:
                        await self.close()
                except (trio.BrokenResourceError, trio.ClosedResourceError) as problem:
                    _log.debug("%s", problem)

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """What came with each read, until the end; what a newer runner says and we do not know is skipped.

        Raises `Mute` and the errors of sockets.
        """
        rest = b""
        while True:
            data = await self._stream.receive_some(READ_BYTES)
            if not data:
                return
            *lines, rest = (rest + bytes(data)).split(b"\n")
            if len(rest) > LINE_BYTES:
                raise Mute("a line without end")
            events = []
            for line in lines:
                try:
                    events.append(_decoder.decode(line))
                except msgspec.DecodeError as error:  # noqa: PERF203  a line costs a thousand times more
                    _log.debug("a line of a runner is not understood: %s", error)
            if events:
                yield events

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)


async def attach(path: Path, patience_seconds: float) -> Attachment:
    """Connect to the runner of that directory. Raises `OSError`, `trio.TooSlowError` and `Mute`."""
    # Through a descriptor of the directory: a Unix socket's path may have 107 bytes only (unix(7)).
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with trio.fail_after(patience_seconds):
                await sock.connect(f"/proc/self/fd/{folder}/socket")
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(folder)
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        sock.close()
        raise Mute(f"its socket belongs to user {uid}")
    return Attachment(trio.SocketStream(sock), patience_seconds)
