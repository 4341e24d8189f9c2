"""The tables of docs/fits.md: the listed models on single Macs, and on three that are alike."""

from __future__ import annotations

from collections.abc import Sequence

from sealring.cli.fitting.fitting import fit
from sealring.cli.fitting.known import Known, known_models
from sealring.cli.fitting.machines import mac, told
from sealring.mesh.units import size

SIZES = (16, 36, 64, 128, 256, 512)
BITS = 4


def tables() -> str:
    """Both tables in Markdown. A cell has estimated tokens a second, and the context in units of 1,024."""
    alone = _table([(f"{memory} GB", [memory]) for memory in SIZES])
    three = _table([(f"3 x {memory}", [memory] * 3) for memory in SIZES])
    chips = told([mac(memory) for memory in SIZES])
    return f"Chips: {chips}.\n\n### On one Mac\n{alone}\n\n### On three alike\n{three}"


def _table(columns: Sequence[tuple[str, Sequence[int]]]) -> str:
    head = ["model", "parameters", f"{BITS} bits", *(name for name, _ in columns)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    rows += [_row(one, [sizes for _, sizes in columns]) for one in known_models()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Known, clusters: Sequence[Sequence[int]]) -> list[str]:
    profile, share = one.profile(BITS), one.read_share(BITS)
    cells, weights = [], 0
    for sizes in clusters:
        found = fit(profile, [mac(memory) for memory in sizes], read_share=share)
        weights, on = found.weights, len(found.machines)
        cell = f"{rate_text(found.rate)} ({_thousands(found.context)})" + (f" on {on}" if on > 1 else "")
        cells.append(cell if found.fits else "")
    return [one.name, billions(one.parameters), size(weights), *cells]


def rate_text(rate: float) -> str:
    """Tokens a second, no more exact than an estimate is."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1024:.0f}k"


def billions(count: int) -> str:
    """A number of parameters as people write it."""
    return f"{count / 1e9:.1f}B" if count < 100e9 else f"{count / 1e9:.0f}B"
