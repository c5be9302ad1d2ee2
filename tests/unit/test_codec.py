"""Frames and messages: round trips, any split, and what is refused."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kueue.errors import Bug, ProtocolError
from kueue.model import EndRecord, Exited, JobRange, Payload, Place, Raw, Request
from kueue.protocol import codec, messages
from kueue.protocol.messages import (
    AttemptEnded,
    AttemptStarted,
    ClientHello,
    Done,
    Heartbeat,
    Output,
    Submit,
    WorkerHello,
)

heartbeats = st.builds(Heartbeat, number=st.integers(0, 2**53 - 1))
ended = st.builds(
    AttemptEnded,
    offer=st.integers(0, 2**50 - 1),
    end=st.builds(
        EndRecord, outcome=st.builds(Exited, st.integers(0, 255)), started_wall=st.none(), ended_wall=st.floats(0, 1e11)
    ),
)
from_worker = st.lists(
    st.one_of(
        heartbeats, ended, st.builds(AttemptStarted, offer=st.integers(0, 2**50 - 1), started_wall=st.floats(0, 1e11))
    ),
    min_size=1,
)


def body_of(frame):
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return bytes(frame[4:])


@given(st.lists(from_worker, max_size=5), st.data())
def test_messages_come_back_however_the_stream_is_cut(batches, data):
    stream = b"".join(codec.encode(batch) for batch in batches)
    reader = codec.FrameReader(10**6)
    received = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += codec.from_worker.decode_all(reader.feed(stream[:cut]))
        stream = stream[cut:]
    assert received == [message for batch in batches for message in batch]
    assert reader.is_between_frames


def test_a_stream_that_ends_inside_a_frame_is_noticed():
    reader = codec.FrameReader(100)
    assert reader.feed(codec.encode([Heartbeat(number=1)])[:-1]) == []
    assert not reader.is_between_frames


@pytest.mark.parametrize("length", [101, 2**30, 2**32 - 1])
def test_a_frame_above_the_limit_is_refused_before_its_body_comes(length):
    with pytest.raises(ProtocolError, match=f"{length} bytes was announced; at most 100"):
        codec.FrameReader(100).feed(length.to_bytes(4, "big"))


def test_a_frame_of_just_the_limit_is_read():
    reader = codec.FrameReader(100)
    assert reader.feed((100).to_bytes(4, "big") + b"x" * 100) == [b"x" * 100]


def test_the_limit_may_grow_after_the_hello():
    reader = codec.FrameReader(10)
    reader.limit = 100
    assert reader.feed((50).to_bytes(4, "big") + b"y" * 50) == [b"y" * 50]


@given(st.binary())
def test_junk_is_a_protocol_error_or_a_list_and_never_anything_else(junk):
    for decoder in (codec.from_client, codec.to_client, codec.from_worker, codec.to_worker, codec.first):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decoder.decode(junk), list)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('[{"type":"ListJobs","seq":1},{"type":"ListJobs","seq":"x"}]', "$[1].seq"),
        ('[{"type":"ListJobs"}]', "seq"),
        ('[{"type":"Nonsense"}]', "Nonsense"),
        ('[{"type":"Heartbeat","number":1}]', "Heartbeat"),
        ("{}", "array"),
        ("[1]", "$[0]"),
        ("[", "truncated"),
        (
            '[{"type":"Submit","seq":1,"request_id":"r","ranges":[{"payload":{"argv":[7]}}]}]',
            "$[0].ranges[0].payload.argv[0]",
        ),
        ("[" * 200_000, "Not understood"),
        ('[{"type":"ListJobs","seq":1,"new":' + "[" * 200_000 + "]" * 200_000 + "}]", "nested too deeply"),
    ],
)
def test_a_bad_message_is_refused_naming_the_place(body, place):
    with pytest.raises(ProtocolError) as caught:
        codec.from_client.decode(body.encode())
    assert place in str(caught.value)


def test_an_unknown_field_is_skipped_and_a_new_one_has_its_default():
    assert codec.from_client.decode(b'[{"type":"ClientHello","from_the_future":{"a":[1]}}]') == [ClientHello()]


def test_the_first_message_may_be_of_a_client_or_a_worker():
    worker = WorkerHello(
        identity="i",
        name="n",
        machine_id="m",
        boot_id="b",
        totals=msgspec.convert({"slots": 1, "cores": 1, "ram_mb": 1}, messages.MachineTotals),
    )
    assert codec.first.decode(body_of(codec.encode([ClientHello()]))) == [ClientHello()]
    assert codec.first.decode(body_of(codec.encode([worker]))) == [worker]


def test_what_does_not_fit_one_frame_goes_in_several_and_a_single_giant_is_our_own_fault():
    outputs = [Output(seq=n, offset=0, data=b"x" * 300) for n in range(50)]
    frames = codec.encode(outputs, limit=2000)
    reader = codec.FrameReader(2000)
    bodies = reader.feed(frames)
    assert len(bodies) > 10
    assert codec.to_client.decode_all(bodies) == outputs
    with pytest.raises(Bug, match="Output of"):
        codec.encode([Output(seq=1, offset=0, data=b"x" * 3000)], limit=2000)


def test_a_message_is_plain_json_with_its_type():
    frame = codec.encode([Done(seq=1, text="ü")])
    assert json.loads(body_of(frame)) == [{"type": "Done", "seq": 1, "text": "ü", "count": 0}]


def test_strings_that_are_not_utf8_and_bytes_travel():
    submit = Submit(
        seq=1,
        request_id="r",
        ranges=(JobRange(payload=Payload(argv=(Raw("6Q=="), "ok")), place=Place(cwd=Raw("6Q==")), request=Request()),),
    )
    assert codec.from_client.decode(body_of(codec.encode([submit]))) == [submit]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_a_large_frame_in_small_chunks_costs_no_more_than_its_bytes(bodies):
    reader = codec.FrameReader(100)
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    got = [body for index in range(len(stream)) for body in reader.feed(stream[index : index + 1])]
    assert got == bodies
