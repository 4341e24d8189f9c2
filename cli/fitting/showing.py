"""What `sealring model fits` prints, and what `deploy` suggests when a model does not fit."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sealring.cli.fitting.fitting import RATED_CONTEXT, Fit, best_fits, fit
from sealring.cli.fitting.known import WIDTHS, Known, find_known, known_models, profile_of
from sealring.cli.fitting.machines import Mac, told
from sealring.cli.fitting.tables import billions, rate_text
from sealring.cli.terminal.output import print_data, print_json, print_table
from sealring.mesh.errors import NotFound, SealringError
from sealring.mesh.units import size

_SUGGESTED = 3
_LAYERS = 32
_CACHES = ("kv_bytes_per_token", "kv_max_tokens", "state_bytes")


Row = tuple[str, int, str, Fit]
"""Name, parameters, precision and fit of a model."""


def fit_of(macs: Sequence[Mac], name: str, measured: Mapping[str, Any], context: int) -> Row:
    """The fit of a model in a folder, by its profile."""
    found = _fit(profile_of(measured), macs, context)
    return name, measured["card"]["parameters"], measured["card"]["precision"], found


def fits_of(macs: Sequence[Mac], model: str, bits: int, context: int) -> list[Row]:
    """Each listed model with `bits` bits, 4 if that is 0; a `model` with each of WIDTHS, unless it or `bits`
    names one. Raises NotFound (MODEL_NOT_LISTED), InvalidInput."""
    if model:
        known, named = find_known(model)
        widths = [bits or named] if bits or named else list(WIDTHS)
        asked = [(known, width) for width in widths if width]
    else:
        asked = [(known, bits or WIDTHS[0]) for known in known_models()]
    return [
        (one.name, one.parameters, f"{width} bits", _known_fit(one, macs, width, context))
        for one, width in asked
    ]


def _known_fit(one: Known, macs: Sequence[Mac], bits: int, context: int = 0) -> Fit:
    return _fit(one.profile(bits), macs, context, one.read_share(bits))


def _fit(profile: Any, macs: Sequence[Mac], context: int, read_share: float = 1.0) -> Fit:
    longest = min(context, profile.max_context) if profile.max_context else context
    return fit(profile, macs, longest, read_share)


@functools.lru_cache(maxsize=256)
def lacking_of(name: str, weights: int, macs: tuple[Mac, ...]) -> int:
    """Bytes that machines lack for a model that they have in a folder of this name; 0 if it fits.

    One that is not listed counts as layers alike with these `weights` (bytes), without caches."""
    with contextlib.suppress(NotFound):
        known, bits = find_known(name)
        if bits:
            return _known_fit(known, macs, bits).lacking
    layer = -(-weights // _LAYERS)
    alike = {"layers": _LAYERS, "layer_bytes": [layer] * _LAYERS, **dict.fromkeys(_CACHES, [0] * _LAYERS)}
    return fit(profile_of(defaultdict(int, alike)), macs).lacking


def print_fits(
    found: Sequence[Row], macs: Sequence[Mac], where: str, *, listed: bool, every: bool, as_json: bool
) -> None:
    """The fits as a table, and below it what they are estimated from. Without `every` row, models that do not
    fit are counted where another does."""
    if as_json:
        rows = [
            {"model": name, "parameters": count, "precision": precision, **asdict(one)}
            for name, count, precision, one in found
        ]
        print_json({"machines": [asdict(one) for one in macs], "models": rows})
        return
    shown = (not every and [row for row in found if row[3].fits]) or found
    columns = ["model", "parameters", "precision", "weights", "fits", "context", "tokens/s, estimated"]
    print_table(
        columns, [[name, billions(count), precision, *_cells(one)] for name, count, precision, one in shown]
    )
    print_data("")
    if len(shown) < len(found):
        print_data(f"{len(found) - len(shown)} more do not fit: --all shows what they lack")
    print_data(f"{where}: {', '.join(f'{one.name} ({size(one.usable)} for models)' for one in macs)}")
    several = any(len(row[3].machines) > 1 for row in shown)
    fewer = "; fewer machines may do with a shorter one: --context TOKENS" * several
    print_data(
        f"estimated, for one request with {RATED_CONTEXT // 2} tokens before it, by the memory bandwidth of "
        f"{told(macs)}; context: what fits of the model's own{fewer}; images take 1 to 2 GiB more"
    )
    if listed:
        print_data("get one by its name: sealring model get NAME --bits 4")


def _cells(one: Fit) -> list[Any]:
    if not one.fits:
        return [size(one.weights), f"lacks {size(one.lacking)}", "", ""]
    on = f"on {len(one.machines)}: {', '.join(one.machines)}" if len(one.machines) > 1 else one.machines[0]
    return [size(one.weights), on, one.context, rate_text(one.rate) if one.rate else ""]


def suggestion(model: str, macs: Sequence[Mac]) -> str:
    """A hint with models to deploy in the place of one that does not fit; empty if no listed model fits."""
    ways = []
    try:
        known, named = find_known(model)
        smaller = [width for width in reversed(WIDTHS) if width < (named or WIDTHS[-1])]
        fitting = [width for width in smaller if _known_fit(known, macs, width).fits]
        ways += [f"{known.name} in {fitting[0]} bits" if fitting else ""]
    except NotFound:
        pass
    try:
        ways += [
            f"{one.name} in {WIDTHS[0]} bits"
            for one in best_fits(known_models(), macs, WIDTHS[0], _SUGGESTED)
        ]
    except SealringError:  # of a machine that reports nothing usable
        return ""
    shown = ", ".join(dict.fromkeys(filter(None, ways)))
    return f"what fits: {shown} (sealring model fits)" if shown else ""
