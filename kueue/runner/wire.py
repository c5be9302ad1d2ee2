"""Lines of JSON over a socket that never blocks, and operating-system strings in them."""

from __future__ import annotations

import base64
import json
import socket
import struct
from typing import Any

PROTOCOL = 1
LINE_LIMIT = 64 * 1024 * 1024  # an environment and arguments as large as any kernel takes, in base64, with room
READ_BYTES = 256 * 1024

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def line_of(message: dict[str, Any]) -> bytes:
    return _encode(message).encode("ascii") + b"\n"


def os_bytes(text: Any) -> bytes:
    """A string of the wire, ``{"b64": …}`` if it is not UTF-8, as the bytes that the system gets."""
    if isinstance(text, dict):
        return base64.b64decode(text["b64"])
    return str(text).encode("utf-8", "surrogateescape")


def shown(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


class Lines:
    """One end of a stream of lines. `receive` and `flush` never block; what cannot be sent yet is kept."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.open = True
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def waits_to_send(self) -> bool:
        return bool(self._out)

    def receive(self) -> list[bytes]:
        """Complete lines, without their ends, that have arrived. At the end of the stream `open` becomes false."""
        while True:
            try:
                data = self.sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
                break
            self._in += data
            if len(data) < READ_BYTES:
                break
        if len(self._in) > LINE_LIMIT:
            self.open = False
            self._in.clear()
        end = self._in.rfind(b"\n")
        if end < 0:
            return []
        lines = bytes(self._in[:end]).split(b"\n")
        del self._in[: end + 1]
        return lines

    def put(self, line: bytes) -> None:
        self._out += line

    def flush(self) -> None:
        """Send what the socket takes. What nobody takes any more is dropped; `receive` tells of that, behind the last
        words of the other end.
        """
        while self._out and self.open:
            try:
                sent = self.sock.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._out.clear()
                return
            del self._out[:sent]

    def close(self) -> None:
        self.open = False
        self.sock.close()


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
