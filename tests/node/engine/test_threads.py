from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

import mlx.core as mx
import pytest

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, Internal
from sealring.mesh.ring import ResolvedStep
from sealring.node.engine import SharedSendBuffer
from sealring.node.engine.records import Incoming
from sealring.node.engine.threads import LAUNCHES, DeviceWaits, Inbox, Intake, Outbox, StepTimes
from sealring.node.wire.channel import Kind, RecordHeader

STEP = ResolvedStep(1, bytes(32), (), (), None, (), ())


def header(number: int, length: int = 1) -> RecordHeader:
    return RecordHeader(Kind.TOKENS, number, bytes(32), "uint8", (length,), length)


def record(number: int) -> Incoming:
    return Incoming(header(number), STEP, 1, 1)


class Received:
    def __init__(self, number: int) -> None:
        self.header = header(number)
        self.data = memoryview(bytes([number]))
        self.released = 0

    def release(self) -> None:
        self.released += 1
        self.data.release()


class Channel:
    """Delivers what is put into `arriving`; None ends it."""

    def __init__(self) -> None:
        self.expected: list[RecordHeader] = []
        self.arriving: SimpleQueue[Received | None] = SimpleQueue()

    def send(self, header: RecordHeader, *buffers: memoryview | bytes) -> None: ...

    def expect(self, header: RecordHeader) -> None:
        self.expected.append(header)

    def receive(self, timeout: float | None = None) -> Received:
        try:
            received = self.arriving.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if received is None:
            raise EpochEnded("over")
        return received

    def shut(self) -> None:
        self.arriving.put(None)

    def close(self) -> None: ...


def fail(error: BaseException) -> None:
    raise AssertionError("nothing fails here") from error


def test_how_long_a_device_has_answered_nobody() -> None:
    now = [0.0]
    waits = DeviceWaits(lambda: now[0])

    def after(seconds: float) -> float:
        now[0] += seconds
        return waits.seconds()

    assert after(100) == 0, "nobody waits"
    with waits.one():
        assert [after(1), after(1), after(5)] == [1, 2, 7]
        other = waits.one()
        thread = threading.Thread(target=other.__enter__)
        thread.start()
        thread.join(200)
        assert after(1) == 8
    assert after(1) == 0, "it has answered one of the two"
    assert after(3) == 3, "the other waits"


def test_an_outbox_notes_how_long_it_waits_for_the_device() -> None:
    now, begun, done = [0.0], threading.Event(), threading.Event()
    sent: SimpleQueue[object] = SimpleQueue()
    outbox = Outbox(lambda label, buffers: sent.put(label), fail)
    outbox.waits = DeviceWaits(lambda: now[0])

    class Results(SharedSendBuffer):
        def wait(self) -> list[memoryview]:
            begun.set()
            done.wait(200)
            return []

    outbox.put(1, Results([b"x"]), StepTimes(1, time.perf_counter()))
    assert begun.wait(200)
    assert outbox.waits.seconds() == 0
    now[0] = 9
    assert outbox.waits.seconds() == 9
    done.set()
    assert sent.get(timeout=200) == 1
    assert outbox.waits.seconds() == 0
    outbox.end()
    outbox.join(200)


def test_results_come_out_in_order_with_their_times() -> None:
    got: SimpleQueue[tuple[object, list[bytes]]] = SimpleQueue()
    outbox = Outbox(lambda label, buffers: got.put((label, [bytes(b) for b in buffers])), fail)
    for number in range(20):
        array = mx.full((3,), number, mx.uint8)
        results = SharedSendBuffer([array, b"x"])
        mx.async_eval(results.pending)  # type: ignore[no-untyped-call]
        outbox.put(number, results, StepTimes(number, time.perf_counter()))
    assert [got.get(timeout=200) for _ in range(20)] == [(n, [bytes([n] * 3), b"x"]) for n in range(20)]
    outbox.end()
    outbox.join(200)
    assert [times.step for times in outbox.trace] == list(range(20))


def test_results_under_way_are_bounded() -> None:
    gate = threading.Event()
    outbox = Outbox(lambda label, buffers: gate.wait(200) and None, fail)
    done: list[int] = []

    def put_all() -> None:
        for number in range(LAUNCHES + 2):
            outbox.put(number, SharedSendBuffer([b""]), StepTimes(number, 0.0))
            done.append(number)

    thread = threading.Thread(target=put_all)
    thread.start()
    thread.join(0.2)
    assert len(done) == LAUNCHES
    gate.set()
    thread.join(200)
    assert len(done) == LAUNCHES + 2
    outbox.end()
    outbox.join(200)


def test_the_end_wakes_a_thread_that_puts() -> None:
    gate = threading.Event()
    outbox = Outbox(lambda label, buffers: gate.wait(200) and None, fail)
    for number in range(LAUNCHES):
        outbox.put(number, SharedSendBuffer([b""]), StepTimes(number, 0.0))
    caught: list[BaseException] = []

    def put() -> None:
        try:
            outbox.put(9, SharedSendBuffer([b""]), StepTimes(9, 0.0))
        except EpochEnded as error:
            caught.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    outbox.end()
    thread.join(200)
    assert len(caught) == 1
    gate.set()
    outbox.join(200)


def test_a_sink_that_fails_is_an_error() -> None:
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def sink(label: object, buffers: list[memoryview]) -> None:
        raise ValueError

    Outbox(sink, errors.put).put(1, SharedSendBuffer([b""]), StepTimes(1, 0.0))
    assert isinstance(errors.get(timeout=200), ValueError)


def test_records_are_taken_in_the_order_announced_and_released_once() -> None:
    channel = Channel()
    intake = Intake(channel, 5.0)
    intake.announce([record(1), record(2)])
    assert channel.expected == [header(1), header(2)]
    received = [Received(1), Received(2)]
    for one in received:
        channel.arriving.put(one)
    assert [intake.take(Kind.TOKENS, bytes), intake.take(Kind.TOKENS, bytes)] == [b"\1", b"\2"]
    assert [one.released for one in received] == [1, 1]
    assert [entry[0] for entry in intake.copied.entries()[0]] == [1, 2]


def test_a_record_of_another_kind_is_not_used() -> None:
    channel = Channel()
    intake = Intake(channel, 5.0)
    channel.arriving.put(received := Received(1))
    with pytest.raises(Internal):
        intake.take(Kind.ACTIVATIONS, bytes)
    assert received.released == 1


def test_a_record_that_does_not_come_is_overdue() -> None:
    with pytest.raises(DeadlineExceeded) as error:
        Intake(Channel(), 0.05).take(Kind.TOKENS, bytes)
    assert error.value.reason == "RECORD_OVERDUE"


def test_the_end_of_the_channel_wakes_a_thread_that_takes() -> None:
    channel = Channel()
    threading.Timer(0.1, channel.shut).start()
    with pytest.raises(EpochEnded):
        Intake(channel, 30.0).take(Kind.TOKENS, bytes)


def test_tokens_are_unpacked_as_they_come() -> None:
    channel, seen = Channel(), SimpleQueue[tuple[int, bytes]]()
    inbox = Inbox(channel, lambda record, data: seen.put((record.header.step, bytes(data))), fail)
    inbox.announce([record(7), record(8)])
    for number in (7, 8):
        channel.arriving.put(Received(number))
    assert [seen.get(timeout=200), seen.get(timeout=200)] == [(7, b"\7"), (8, b"\x08")]
    inbox.end()
    inbox.join(200)


def test_what_was_announced_is_not_taken_in_after_the_end() -> None:
    seen: list[int] = []
    channel, taken = Channel(), threading.Event()

    def take(record: Incoming, data: memoryview) -> None:
        seen.append(record.header.step)
        taken.wait(200)

    inbox = Inbox(channel, take, fail)
    inbox.announce([record(7), record(8)])
    for number in (7, 8):
        channel.arriving.put(Received(number))
    inbox.end()
    taken.set()
    inbox.join(200)
    assert seen in ([], [7])


def test_a_channel_that_ends_is_an_error() -> None:
    errors: SimpleQueue[BaseException] = SimpleQueue()
    channel = Channel()
    inbox = Inbox(channel, lambda record, data: None, errors.put)
    inbox.announce([record(1)])
    channel.shut()
    assert isinstance(errors.get(timeout=200), EpochEnded)


def test_waiting_for_results_ends_with_them_or_with_the_epoch() -> None:
    done = threading.Event()
    outbox = Outbox(lambda label, buffers: None, fail)

    class Results(SharedSendBuffer):
        def wait(self) -> list[memoryview]:
            done.wait(200)
            return []

    first, second = StepTimes(1, 0.0), StepTimes(2, 0.0)
    outbox.put(None, Results([]), first)
    done.set()
    outbox.wait_for(first)
    assert first.ready > 0
    done.clear()
    outbox.put(None, Results([]), second)
    ended = threading.Timer(0.0, outbox.end)
    ended.start()
    with pytest.raises(EpochEnded):
        outbox.wait_for(second)
    done.set()
    assert outbox.join(200)
