"""Frames: a 4-byte big-endian length, then a JSON array of messages. Bytes in, messages out, and back; no I/O.

Rules
- A length above the limit is refused before a byte of its body is kept.
- Many messages share a frame and are encoded and decoded in one call: per message it costs a tenth.
- The peer's mistakes are `ProtocolError`, our own are `Bug`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from kueue.errors import Bug, ProtocolError
from kueue.protocol.messages import FRAME_LIMIT, FromClient, FromWorker, Message, ToClient, ToWorker

HEAD = 4
"""Bytes of a frame's length."""

M = TypeVar("M")

_encoder = msgspec.json.Encoder()


def encode(messages: Sequence[Message], limit: int = FRAME_LIMIT) -> bytes | bytearray:
    """The messages as one frame, or as several when one would have a body above `limit` bytes.

    Raises `Bug` when a single message is larger than the limit; the caller has to send such things in parts.
    """
    frame = bytearray(HEAD)
    _encoder.encode_into(messages, frame, HEAD)
    size = len(frame) - HEAD
    if size <= limit:
        frame[:HEAD] = size.to_bytes(HEAD, "big")
        return frame
    if len(messages) < 2:
        raise Bug(f"a {type(messages[0]).__name__} of {size} bytes does not fit into a frame of {limit}")
    middle = len(messages) // 2
    return encode(messages[:middle], limit) + encode(messages[middle:], limit)


class FrameReader:
    """Cuts a stream of bytes into the bodies of frames; `limit` may be changed between two calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    @property
    def is_between_frames(self) -> bool:
        """False when the stream ends here in the middle of a frame."""
        return not self._rest

    def feed(self, chunk: bytes | bytearray) -> list[bytes]:
        """The bodies that `chunk` completes, in order.

        Raises `ProtocolError` when a frame is announced that is longer than the limit; the reader is of no use then.
        """
        rest = self._rest
        rest += chunk
        bodies = []
        start, available = 0, len(rest)
        while available - start >= HEAD:
            size = int.from_bytes(rest[start : start + HEAD], "big")
            if size > self.limit:
                raise ProtocolError(f"A frame of {size} bytes was announced; at most {self.limit} are allowed here.")
            if available - start - HEAD < size:
                break
            start += HEAD + size
            bodies.append(bytes(memoryview(rest)[start - size : start]))
        # A frame of 16 MiB comes in hundreds of chunks: only what was handed out is moved, once for all.
        del rest[:start]
        return bodies


class Decoder(Generic[M]):
    """Bodies of frames to the messages of one direction."""

    def __init__(self, kind: object) -> None:
        self._decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]  # a union made at run time

    def decode(self, body: bytes) -> list[M]:
        """All messages of one body. Raises `ProtocolError` naming the place: "… at `$[2].seq`", the third message."""
        try:
            return self._decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"Not understood: {error}.") from error
        except RecursionError as error:
            raise ProtocolError("Not understood: nested too deeply.") from error
        except UnicodeDecodeError as error:
            raise ProtocolError("Not understood: not UTF-8.") from error

    def decode_all(self, bodies: Iterable[bytes]) -> list[M]:
        """All messages of several bodies, in order."""
        messages: list[M] = []
        for body in bodies:
            messages += self.decode(body)
        return messages


from_client: Decoder[FromClient] = Decoder(FromClient)
to_client: Decoder[ToClient] = Decoder(ToClient)
from_worker: Decoder[FromWorker] = Decoder(FromWorker)
to_worker: Decoder[ToWorker] = Decoder(ToWorker)
first: Decoder[FromClient | FromWorker] = Decoder(FromClient | FromWorker)
"""For the first message on a new connection, before it is known who speaks."""
