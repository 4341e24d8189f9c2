"""The data channel, both ends in one process."""

import contextlib
import os
import select
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import EpochEnded, InvalidInput, ResourceExhausted
from sealring.node.wire import channel
from sealring.node.wire.arena import SLOTS
from sealring.node.wire.channel import (
    MAX_RECORD_BYTES,
    CarrierChannel,
    EngineChannel,
    Kind,
    MessageSocket,
    RecordHeader,
    create_channel,
    decode_message,
    encode_message,
    split,
)


@contextlib.contextmanager
def both_ends():
    descriptors = create_channel()
    carrier = CarrierChannel(*descriptors.carrier)
    with EngineChannel(*descriptors.engine) as engine:
        yield engine, carrier
    carrier.close()


@pytest.fixture
def ends():
    with both_ends() as made:
        yield made


def header(length: int, step: int = 1) -> RecordHeader:
    return RecordHeader(Kind.ACTIVATIONS, step, bytes(32), "uint8", (length,), length)


def test_a_channel_that_cannot_be_made_leaves_nothing_open(monkeypatch):
    def nothing_left():
        raise ResourceExhausted("no shared memory for the data channel", reason="NO_SHARED_MEMORY")

    arenas = iter([channel.create_arena, nothing_left])
    monkeypatch.setattr(channel, "create_arena", lambda: next(arenas)())
    before = os.listdir("/dev/fd")
    with pytest.raises(ResourceExhausted):
        create_channel()
    assert len(os.listdir("/dev/fd")) == len(before)


headers = st.builds(
    lambda kind, step, digest, dtype, shape, length: RecordHeader(kind, step, digest, dtype, shape, length),
    st.sampled_from(list(Kind)),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["uint8", "uint32", "float16", "bfloat16", "float32"]),
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)


@given(headers, st.integers(-1, SLOTS - 1))
def test_a_message_survives_its_encoding(record, slot):
    assert decode_message(encode_message(record, slot)) == (record, slot)


@given(st.integers(0, 5 * MAX_RECORD_BYTES))
def test_parts_of_a_large_payload_add_up_and_none_is_too_large(length):
    parts = list(split(header(length)))
    assert sum(part.length for part in parts) == length
    assert all(part.length <= MAX_RECORD_BYTES for part in parts)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=20))
def test_what_the_engine_sends_reaches_the_carrier_in_order(payloads):
    with both_ends() as (engine, carrier):
        got = []

        def take():
            for _ in payloads:
                record, data, slot = carrier.next_outgoing()
                got.append((record.length, bytes(data)))
                carrier.sent(slot, data)

        taker = threading.Thread(target=take)
        taker.start()
        for payload in payloads:
            engine.send(header(len(payload)), payload)
        taker.join(200)
        assert got == [(len(payload), payload) for payload in payloads]


@given(st.lists(st.binary(min_size=4, max_size=4), max_size=20), st.data())
def test_messages_are_the_same_however_their_bytes_arrive(messages, data):
    near, far = socket.socketpair()
    reader = MessageSocket(near.detach(), 4)
    unsent, arrived, got = b"".join(messages), 0, 0
    with far, contextlib.closing(reader):
        while unsent:
            count = data.draw(st.integers(1, len(unsent)))
            far.sendall(unsent[:count])
            unsent, arrived = unsent[count:], arrived + count
            while reader.ready():
                assert reader.receive() == messages[got]
                got += 1
            assert got == arrived // 4
            with pytest.raises(TimeoutError):
                reader.receive(0)  # no more than a part of one is there


def deliver(carrier: CarrierChannel, payload: bytes) -> None:
    record = carrier.next_expected()
    slot, data = carrier.free_slot(record.length)
    data[:] = payload[: record.length]
    carrier.deliver(record, slot, data)


@pytest.fixture
def narrow_pairs(monkeypatch):
    """Sockets that hold as little as a Mac's, and get no more."""
    made = socket.socketpair

    def narrow():
        pair = made()
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return pair

    monkeypatch.setattr(channel, "socket_pair", narrow)


def test_announcing_waits_for_nobody_and_nothing_is_lost(narrow_pairs, monkeypatch):
    """A carrier that waits for a slow neighbour reads no announcements; the engine has to go on, also where
    it has no memory for another thread."""
    with both_ends() as (engine, carrier):
        monkeypatch.delattr(threading.Thread, "start")
        engine.expect(header(3, 1))
        deliver(carrier, b"one")
        for step in range(2, 2000):
            engine.expect(header(3, step))
        engine.receive().release()  # nor does giving back a slot wait
        for step in range(2, 2000):
            assert carrier.next_expected().step == step
        for _ in range(SLOTS):  # the one that was given back too
            carrier.free_slot(3)[1].release()
        engine.expect(header(3, 2000))
        assert carrier.next_expected().step == 2000


def test_announcements_that_nobody_reads_do_not_outlive_the_channel(narrow_pairs):
    before = threading.enumerate()
    with both_ends() as (engine, carrier):
        for step in range(500):
            engine.expect(header(3, step))
        carrier.shut()
        with pytest.raises(EpochEnded):
            for _ in range(1000):
                engine.expect(header(3))
                time.sleep(0.01)
    assert threading.enumerate() == before


def test_a_payload_above_one_record_is_put_together_again(ends):
    engine, carrier = ends
    length = MAX_RECORD_BYTES + 5
    payload = bytes(range(256)) * (length // 256) + b"12345"
    engine.expect(header(length))

    def forward():
        start = 0
        for _ in range(2):
            record, data, slot = carrier.next_outgoing()
            deliver(carrier, bytes(data))
            start += record.length
            carrier.sent(slot, data)

    thread = threading.Thread(target=forward)
    thread.start()
    engine.send(header(length), payload)
    received = engine.receive()
    thread.join(200)
    assert bytes(received.data) == payload
    received.release()


def test_sending_waits_for_a_free_slot_and_goes_on(ends):
    engine, carrier = ends
    done = threading.Event()

    def send():
        for _ in range(SLOTS + 1):
            engine.send(header(1), b"x")
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not done.wait(0.2)
    _, data, slot = carrier.next_outgoing()
    carrier.sent(slot, data)
    assert done.wait(200)
    thread.join()


def test_a_payload_of_another_length_is_refused(ends):
    with pytest.raises(InvalidInput):
        ends[0].send(header(3), b"ab")


@pytest.mark.parametrize("who", ["engine", "carrier"])
def test_waiting_ends_when_the_other_end_goes(ends, who):
    engine, carrier = ends
    waiting, leaving = (
        (engine.receive, carrier.shut) if who == "engine" else (carrier.next_expected, engine.shut)
    )
    caught = []

    def wait():
        try:
            waiting()
        except EpochEnded as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    leaving()
    thread.join(200)
    assert len(caught) == 1


def test_a_waiting_receive_ends_on_shut_from_another_thread(ends):
    engine, _ = ends
    timer = threading.Timer(0.1, engine.shut)
    timer.start()
    with pytest.raises(EpochEnded):
        engine.receive()
    timer.join()


def test_a_slot_that_is_given_back_travels_with_the_next_announcement(ends):
    engine, carrier = ends

    def wakes(number: int) -> int:
        """Times that a carrier which waits for announcements finds some, for `number` records."""
        poll, woken = select.poll(), 0
        poll.register(carrier.incoming_descriptor, select.POLLIN)
        for _ in range(number):
            engine.expect(header(1))
            woken += len(poll.poll(0))
            assert carrier.expects()
            deliver(carrier, b"x")
            engine.receive().release()
            woken += len(poll.poll(0))
        return woken

    assert wakes(3 * SLOTS) == 3 * SLOTS
