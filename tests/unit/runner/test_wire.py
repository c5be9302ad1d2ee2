"""Lines over a socket whose other end goes away."""

import socket

from kueue.runner.wire import Lines


def test_last_words_are_read_although_nothing_can_be_told_any_more():
    """A worker that leaves in order says so and hangs up; a runner that had something to tell just then brought it back."""
    ours, theirs = socket.socketpair()
    lines = Lines(ours)
    theirs.sendall(b"the worker leaves\n")
    theirs.close()
    lines.put(b"an attempt is paused\n")
    lines.flush()
    assert not lines.waits_to_send
    assert lines.receive() == [b"the worker leaves"]
    assert lines.receive() == []
    assert not lines.open
    lines.close()
