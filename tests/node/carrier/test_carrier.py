"""Real carrier processes on a real MLX ring over loopback, with keys of real handshakes."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
from knock import knocking

from sealring.mesh.crypto import DEFAULT_SUITES, TAG_BYTES, SoftwareSigner, member_id
from sealring.mesh.errors import EpochEnded
from sealring.node.carrier.main import RECORD_DEADLINE, check_progress
from sealring.node.carrier.neighbours import PASS_BYTES
from sealring.node.carrier.pump import Counters
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import SessionKeys
from sealring.node.link.params import LinkParams
from sealring.node.wire.channel import EngineChannel, Kind, RecordHeader, create_channel
from sealring.node.wire.frames import FrameSocket
from sealring.v1 import control_pb2, engine_pb2

DIGEST = bytes(range(32))


def handshake(ranks: dict[int, SoftwareSigner], from_rank: int, to_rank: int) -> dict[int, SessionKeys]:
    """Session keys of one link by rank."""

    def params(own: int) -> LinkParams:
        peer = to_rank if own == from_rank else from_rank
        return LinkParams(
            cluster="test",
            ring="ring-0",
            epoch=1,
            from_rank=from_rank,
            to_rank=to_rank,
            own_rank=own,
            roster_version=1,
            roster_hash=b"\x01" * 32,
            own_id=member_id(ranks[own].public_key),
            peer_id=member_id(ranks[peer].public_key),
            peer_key=ranks[peer].public_key,
            suites=DEFAULT_SUITES,
        )

    low, high = sorted((from_rank, to_rank))
    initiator = Initiator(params(low), ranks[low])
    responder = Responder(params(high), ranks[high], EphemeralLedger())
    reply = responder.on_message(initiator.start()).message
    proof = initiator.on_message(reply).message
    finished = responder.on_message(proof)
    done = initiator.on_message(finished.message)
    return {low: done.session, high: finished.session}


@dataclass
class Carrier:
    process: subprocess.Popen
    control: FrameSocket
    channel: EngineChannel

    def event(self, kind: str):
        """The next event; a knock that comes before it is done, as the daemon would."""
        event = self.control.receive(engine_pb2.CarrierEvent)
        assert event is not None
        if event.WhichOneof("event") == "knock":
            with knocking(event.knock.port):
                return self.event(kind)
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)


def spawn(listener: socket.socket) -> Carrier:
    ends = create_channel()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "sealring.node.carrier.main", "--control-fd", str(theirs.fileno())]
    process = subprocess.Popen(
        [*command, "--channel-fds", ",".join(map(str, ends.carrier)), "--listen-fd", str(listener.fileno())],
        pass_fds=(theirs.fileno(), *ends.carrier, listener.fileno()),
    )
    theirs.close()
    listener.close()
    for descriptor in ends.carrier:
        os.close(descriptor)
    return Carrier(process, FrameSocket(ours), EngineChannel(*ends.engine))


class Ring:
    def __init__(self, size: int, form_timeout_ms: int = 15000) -> None:
        self.size = size
        signers = self.signers = {rank: SoftwareSigner.generate() for rank in range(size)}
        links = [handshake(signers, rank, (rank + 1) % size) for rank in range(size)]
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
        passes = [one[rank].export(b"ring pass", length=PASS_BYTES) for rank, one in enumerate(links)]
        self.carriers = [spawn(one) for one in listeners]
        for rank, carrier in enumerate(self.carriers):
            carrier.event("ready")
            start = engine_pb2.StartCarrier(
                rank=rank,
                size=size,
                next_address=self.addresses[(rank + 1) % size],
                outgoing_keys=links[rank][rank].to_carrier(),
                incoming_keys=links[rank - 1][rank].to_carrier(),
                outgoing_pass=passes[rank],
                incoming_pass=passes[rank - 1],
                form_timeout_ms=form_timeout_ms,
            )
            carrier.control.send(engine_pb2.CarrierCommand(start=start))

    def form(self) -> None:
        self.begin()
        for carrier in self.carriers:
            carrier.event("up")

    def begin(self, ranks: range | None = None) -> None:
        for rank in ranks or range(self.size):
            self.carriers[rank].control.send(engine_pb2.CarrierCommand(form=engine_pb2.FormGroup()))

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.process.kill()
            carrier.process.wait(200)
            carrier.channel.close()
            carrier.control.close()


@pytest.fixture
def make_ring():
    rings = []

    def make(size: int, **options) -> Ring:
        rings.append(Ring(size, **options))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()


def state(step: int, length: int, digest: bytes = DIGEST) -> RecordHeader:
    return RecordHeader(Kind.ACTIVATIONS, step, digest, "uint8", (length,), length)


@pytest.mark.parametrize("size", [2, 3])
def test_records_go_round_the_ring(make_ring, size):
    ring = make_ring(size)
    ring.form()
    for step, length in enumerate((1, 300, 70_000, 1 << 20), start=1):
        payload = os.urandom(length)
        for rank, carrier in enumerate(ring.carriers):
            after = ring.carriers[(rank + 1) % size].channel
            after.expect(state(step, length))
            carrier.channel.send(state(step, length), payload)
            received = after.receive()
            assert bytes(received.data) == payload
            received.release()


def test_both_links_of_a_ring_carry_records_at_once(make_ring):
    ring = make_ring(2)
    ring.form()
    payload = os.urandom(200_000)
    for step in range(1, 30):
        for rank in (0, 1):
            ring.carriers[rank].channel.expect(state(step, len(payload)))
            ring.carriers[rank].channel.send(state(step, len(payload)), payload)
        for rank in (0, 1):
            received = ring.carriers[rank].channel.receive()
            assert bytes(received.data) == payload
            received.release()


def test_a_record_that_is_not_the_announced_one_ends_the_epoch(make_ring):
    ring = make_ring(2)
    ring.form()
    ring.carriers[1].channel.expect(state(1, 64, digest=bytes(32)))
    ring.carriers[0].channel.send(state(1, 64), bytes(64))
    fault = ring.carriers[1].event("fault")
    assert fault.problem.reason == "RECORD_REFUSED"
    with pytest.raises(EpochEnded):
        ring.carriers[1].channel.receive()
    assert ring.carriers[1].process.wait(200) == 1


@pytest.mark.parametrize("idle", [False, True])
def test_a_neighbour_that_dies_ends_the_epoch_at_once(make_ring, idle):
    ring = make_ring(2)
    ring.form()
    if not idle:
        ring.carriers[1].channel.expect(state(1, 10))
    ring.carriers[0].process.kill()
    assert ring.carriers[1].event("fault").problem.reason == "PEER_LOST"
    with pytest.raises(EpochEnded):
        ring.carriers[1].channel.receive()


@pytest.mark.parametrize("said", [0, 31, 32, 5000])
def test_strangers_on_the_ring_port_get_nothing_and_the_ring_forms(make_ring, said):
    ring = make_ring(2, form_timeout_ms=60000)
    host, port = ring.addresses[0].split(":")
    strangers = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
    for stranger in strangers:
        stranger.sendall(os.urandom(said))
    ring.form()
    for stranger in strangers:
        got = b""
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(4096):
                got += part
        assert got == b""
        stranger.close()
    with pytest.raises(ConnectionError):
        socket.create_connection((host, int(port)))
    serves(ring)


def serves(ring: Ring) -> None:
    for rank, carrier in enumerate(ring.carriers):
        after = ring.carriers[(rank + 1) % ring.size].channel
        after.expect(state(1, 64))
        carrier.channel.send(state(1, 64), bytes(range(64)))
        received = after.receive()
        assert bytes(received.data) == bytes(range(64))
        received.release()


def test_keys_given_again_are_those_that_count(make_ring):
    """A neighbour repeated its handshake: this end has new keys of that link when the group is formed."""
    ring = make_ring(2)
    again = handshake(ring.signers, 0, 1)
    link_pass = again[0].export(b"ring pass", length=PASS_BYTES)
    for start, rank in (
        (engine_pb2.StartCarrier(outgoing_keys=again[0].to_carrier(), outgoing_pass=link_pass), 0),
        (engine_pb2.StartCarrier(incoming_keys=again[1].to_carrier(), incoming_pass=link_pass), 1),
    ):
        ring.carriers[rank].control.send(engine_pb2.CarrierCommand(start=start))
    ring.form()
    serves(ring)


def test_keys_of_another_handshake_form_no_ring(make_ring):
    ring = make_ring(2, form_timeout_ms=1500)
    again = handshake(ring.signers, 0, 1)
    start = engine_pb2.StartCarrier(
        outgoing_keys=again[0].to_carrier(), outgoing_pass=again[0].export(b"ring pass", length=PASS_BYTES)
    )
    ring.carriers[0].control.send(engine_pb2.CarrierCommand(start=start))
    ring.begin()
    reasons = {carrier.event("fault").problem.reason for carrier in ring.carriers}
    assert reasons <= {"NO_CONFIRMATION", "RING_FAILED"}


def test_an_idle_ring_burns_nothing(make_ring):
    """A process that spins gets as much of the machine as this one, which does so meanwhile."""
    ring = make_ring(2)
    ring.form()
    ring.carriers[0].channel.expect(state(1, 10))  # even while a record is announced
    for carrier in ring.carriers:
        ping(carrier)
    while max(_burnt_beside(0.4, ring.carriers)) > 0.1:
        pass  # what was left to do is done; this hangs if they spin


def _burnt_beside(own: float, carriers: list[Carrier]) -> list[float]:
    """Processor seconds of each carrier while this process burns `own` seconds."""
    import psutil

    def burnt() -> list[float]:
        return [sum(psutil.Process(carrier.process.pid).cpu_times()[:2]) for carrier in carriers]

    before, begun = burnt(), time.process_time()
    while time.process_time() - begun < own:
        pass
    return [end - start for start, end in zip(before, burnt(), strict=True)]


def ping(carrier: Carrier) -> engine_pb2.CarrierPong:
    carrier.control.send(engine_pb2.CarrierCommand(ping=control_pb2.Ping(sequence=1)))
    return carrier.event("pong")


def waited(carrier: Carrier, above: int) -> int:
    """The milliseconds that a carrier has waited for a record, once they are more than `above`."""
    while (found := ping(carrier).waiting_ms) <= above:
        pass
    return found


def test_a_pong_tells_how_long_a_record_is_waited_for(make_ring):
    ring = make_ring(2)
    ring.form()
    ring.carriers[1].channel.expect(state(1, 64))
    first = waited(ring.carriers[1], 0)
    waited(ring.carriers[1], first)  # it grows
    assert ping(ring.carriers[0]).waiting_ms == 0, "nothing is announced there"
    ring.carriers[0].channel.send(state(1, 64), bytes(64))
    ring.carriers[1].channel.receive().release()
    pong = ping(ring.carriers[1])
    assert (pong.waiting_ms, pong.records_opened) == (0, 1)
    assert ping(ring.carriers[0]).records_sealed == 1


def test_an_engine_that_is_behind_is_not_a_record_that_does_not_come(make_ring):
    """Nothing is announced, or no slot is free, because the engine computes: that may take long."""
    ring = make_ring(2)
    ring.form()
    for step in range(1, 4):
        ring.carriers[0].channel.send(state(step, 64), bytes(64))
    ring.carriers[0].channel.expect(state(4, 64))  # the other link waits meanwhile
    waited(ring.carriers[0], 200)
    assert ping(ring.carriers[1]).waiting_ms == 0


def test_the_carrier_ends_with_its_control_pipe(make_ring):
    ring = make_ring(2)
    ring.form()
    ring.carriers[0].control.close()
    assert ring.carriers[0].process.wait(200) == 0


@pytest.mark.parametrize("held", ["sending_since", "receiving_since"])
def test_a_record_that_is_held_back_ends_the_epoch(held):
    """An attacker on the path can keep the rest of a record, for which MLX would wait for ever."""
    counters = Counters()
    check_progress(counters)
    setattr(counters, held, time.monotonic())
    check_progress(counters)
    setattr(counters, held, time.monotonic() - RECORD_DEADLINE - 1)
    with pytest.raises(EpochEnded) as error:
        check_progress(counters)
    assert error.value.reason == "PEER_FROZEN"


def test_records_of_all_lengths_follow_each_other(make_ring):
    """Long ones do not fit the connection's buffers, so that either end has to wait in their middle; one is
    above a record's limit."""
    ring = make_ring(2)
    ring.form()
    lengths = [1 << 20, 5, (16 << 20) + 77, 77, 3 << 20, (1 << 20) - TAG_BYTES, 1]
    payloads = [os.urandom(length) for length in lengths]
    for step, payload in enumerate(payloads, start=1):
        ring.carriers[1].channel.expect(state(step, len(payload)))
    sender = threading.Thread(
        target=lambda: [
            ring.carriers[0].channel.send(state(step, len(payload)), payload)
            for step, payload in enumerate(payloads, start=1)
        ]
    )
    sender.start()
    for payload in payloads:
        received = ring.carriers[1].channel.receive()
        assert received.data == payload
        received.release()
    sender.join(200)
