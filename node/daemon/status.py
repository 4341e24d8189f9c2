"""What a node reports of itself to the coordinator: a hello on each new stream, then heartbeats."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from sealring.mesh.member.roster_keeper import RosterKeeper
from sealring.mesh.rpc.protocol import software_version
from sealring.mesh.system.power import power
from sealring.node.daemon.engines import EngineKeeper, MemoryMeter
from sealring.node.daemon.fetching import Fetcher
from sealring.node.daemon.seats import Seats
from sealring.node.identity.challenge import Prover
from sealring.v1 import membership_pb2


class NodeStatus:
    """Reads the state of one daemon's parts. Use it from one event loop."""

    def __init__(
        self,
        prover: Prover,
        addresses: Callable[[], tuple[str, ...]],
        *,
        rosters: RosterKeeper,
        seats: Seats,
        meter: MemoryMeter,
        engines: EngineKeeper,
        fetcher: Fetcher,
        measures: bool,
    ) -> None:
        """`addresses` lead to the daemon; `measures` says whether this node measures its ways to others when
        it is asked."""
        self._measures = measures
        self._prover = prover
        self._addresses = addresses
        self._rosters = rosters
        self._seats = seats
        self._meter = meter
        self._engines = engines
        self._fetcher = fetcher
        self._instance = secrets.token_bytes(16)

    def hello(self) -> membership_pb2.Hello:
        """The first message on a stream. Raises what signing raises (`Signer.sign`)."""
        key, signature = self._prover.sealing_key()
        return membership_pb2.Hello(
            software_version=software_version(),
            instance=self._instance,
            addresses=self._addresses(),
            sealing_key=key,
            sealing_key_signature=signature,
            roster_version=self._rosters.version,
            measures=self._measures,
            serving=[serving for seat in self._seats if (serving := seat.serving()) is not None],
        )

    def heartbeat(self) -> membership_pb2.Heartbeat:
        """Addresses, memory, load, rings, models and stored prefixes as they are now."""
        stored = self._engines.stored
        return membership_pb2.Heartbeat(
            addresses=self._addresses(),
            memory_total=self._meter.total,
            memory_usable=self._meter.usable,
            memory_used=self._engines.memory_used,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
            rings=[health for seat in self._seats if (health := seat.health()) is not None],
            models=self._fetcher.messages(),
            memory_overhead=self._meter.overhead,
            longest_chunk=self._meter.longest_chunk,
            stored_bytes=max((each.bytes for each in stored), default=0),  # each counts those of all
            stored_read=sum(each.tokens_read for each in stored),
            stored_oldest=min((each.oldest for each in stored), default=0),
            stored_broken=any(each.broken for each in stored),
            stored_blocks=max((each.blocks for each in stored), default=0),
            stored_damaged=sum(each.damaged for each in stored),
            on_battery=power().on_battery,
            low_power=power().low,
            computes_on=self._meter.computes_on,
        )
