"""Cost of sealing and opening a record against the bare AEAD, in one run.

Batches of both take turns, and the fastest of each counts: other load on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.frame import Benchmark, Result, Table
from sealring.mesh.crypto.identity import SoftwareSigner, member_id
from sealring.mesh.crypto.suites import Suite
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import LinkParams, SessionKeys
from sealring.node.link.records import Kind, Link, RecordHeader

SIZES = (4 << 10, 64 << 10, 1 << 20)
ROUNDS = 60


def handshake(suite: Suite, ranks: tuple[int, int] = (0, 1)) -> tuple[SessionKeys, SessionKeys]:
    """Both ends of a fresh handshake under one suite, for the link that leads from one rank to another."""
    signers = (SoftwareSigner.generate(), SoftwareSigner.generate())
    ids = [member_id(signer.public_key) for signer in signers]

    def params(own: int) -> LinkParams:
        peer = signers[1 - own].public_key
        return LinkParams(
            "bench", "ring-0", 1, *ranks, ranks[own], 1, bytes(32), ids[own], ids[1 - own], peer, (suite,)
        )

    low, high = sorted((0, 1), key=lambda end: ranks[end])
    initiator = Initiator(params(low), signers[low])
    responder = Responder(params(high), signers[high], EphemeralLedger())
    reply = responder.on_message(initiator.start()).message
    assert reply is not None
    proof = initiator.on_message(reply).message
    assert proof is not None
    last = responder.on_message(proof)
    assert last.message is not None
    assert last.session is not None
    done = initiator.on_message(last.message).session
    assert done is not None
    return (done, last.session) if low == 0 else (last.session, done)


def linked(suite: Suite) -> tuple[Link, Link]:
    """Both ends of a link, confirmed."""
    first, second = handshake(suite)
    sender, receiver = Link(first), Link(second)
    receiver.opener.open_confirmation(sender.sealer.seal_confirmation())
    return sender, receiver


def per_call(work: Callable[[int], None], seconds: float) -> float:
    """Microseconds per call over a batch of about `seconds`."""
    count = 16
    while True:
        start = time.perf_counter()
        work(count)
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / count * 1e6
        count = max(count * 2, int(count * seconds / max(spent, 1e-9)))


def measure(suite: Suite, size: int, seconds: float) -> dict[str, object]:
    """Seal and open `size` bytes, ours and bare by turns, so that drift of the machine hits both alike."""
    sender, receiver = linked(suite)
    aead = suite.aead(bytes(range(32)))
    plain, out = bytes(size), bytearray(size + 16)
    opened = bytearray(size)
    shape, digest, nonce = (1, size // 2), bytes(32), bytes(12)
    step = 0

    def ours_seal(count: int) -> None:
        nonlocal step
        seal = sender.sealer.seal_into
        for _ in range(count):
            step += 1
            seal(plain, out, RecordHeader(Kind.ACTIVATIONS, step, digest, "bfloat16", shape, size))

    def bare_seal(count: int) -> None:
        encrypt = aead.encrypt_into
        for _ in range(count):
            encrypt(nonce, plain, None, out)

    def ours_round(count: int) -> None:
        nonlocal step
        seal, open_ = sender.sealer.seal_into, receiver.opener.open_into
        for _ in range(count):
            step += 1
            header = RecordHeader(Kind.ACTIVATIONS, step, digest, "bfloat16", shape, size)
            seal(plain, out, header)
            open_(out, opened, header)

    def bare_round(count: int) -> None:
        encrypt, decrypt = aead.encrypt_into, aead.decrypt_into
        for _ in range(count):
            encrypt(nonce, plain, None, out)
            decrypt(nonce, out, None, opened)

    rounds = {"bare_round": bare_round, "ours_round": ours_round}
    times = _by_turns(rounds, seconds)
    sender, receiver = linked(suite)
    times |= _by_turns({"bare_seal": bare_seal, "ours_seal": ours_seal}, seconds)
    return {
        "suite": suite.value,
        "bytes": size,
        **{f"{name}_us": round(value, 2) for name, value in times.items()},
        "seal_ratio": round(times["ours_seal"] / times["bare_seal"], 3),
        "seal_and_open_ratio": round(times["ours_round"] / times["bare_round"], 3),
    }


def _by_turns(works: dict[str, Callable[[int], None]], seconds: float) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            samples[name].append(per_call(work, seconds / ROUNDS))
    return {name: min(values) for name, values in samples.items()}


def handshake_milliseconds(suite: Suite) -> float:
    """The median time of a whole handshake, both ends in this process."""
    samples = []
    for _ in range(30):
        start = time.perf_counter()
        handshake(suite)
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples), 3)


def run(options: argparse.Namespace) -> Result:
    records = [
        measure(suite, size, options.seconds)
        for suite in (Suite.X25519_AES256GCM, Suite.X25519_CHACHA20POLY1305)
        for size in SIZES
    ]
    handshakes = {suite.value: handshake_milliseconds(suite) for suite in Suite}
    return {"records": records, "handshake_both_ends_ms": handshakes}


def tables(result: Result) -> list[Table]:
    keys = tuple(result["records"][0])
    handshakes = [[suite, spent] for suite, spent in result["handshake_both_ends_ms"].items()]
    return [
        Table("sealing and opening, us", keys, [[one[key] for key in keys] for one in result["records"]]),
        Table("handshake, both ends", ["suite", "ms"], handshakes),
    ]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    for suite in dict.fromkeys(one["suite"] for one in result["records"]):
        runs = [one for one in result["records"] if one["suite"] == suite]
        for kind, style in (("ours", "-"), ("bare", "--")):
            times = [one[f"{kind}_round_us"] for one in runs]
            axes.plot([one["bytes"] for one in runs], times, style, marker="o", label=f"{suite}, {kind}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("us to seal and open")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement")


BENCHMARK = Benchmark(
    "seal", (__doc__ or "").splitlines()[0], options, run, tables, chart, quick=("--seconds", "0.1")
)
