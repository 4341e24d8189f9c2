"""Models that people run on Macs, as the profiles that planning takes. `.ci/models.py` makes the list."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from sealring.mesh.errors import NotFound
from sealring.v1 import model_pb2

WIDTHS = (4, 6, 8, 16)
"""Bits of a weight, as `mlx_lm.convert --q-bits` writes them; 16 are those of a model as it is published."""

LISTS = ("layer_bytes", "kv_bytes_per_token", "kv_max_tokens", "state_bytes", "read_bytes")
NUMBERS = ("embed_bytes", "head_bytes", "tied", "max_context", "vocab_size", "handoff_bytes_per_token")
_WIDTH = re.compile(r"(?:[-_]mlx)?[-_](?:(\d{1,2})[- ]?bit\b.*|(?:bf16|fp16)\b)", re.IGNORECASE)
_CLOSE = 5


class Known(NamedTuple):
    """A model of the list: its id on the Hugging Face hub, its parameters, and where its facts are from."""

    id: str
    parameters: int
    source: str
    shapes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[2]

    def profile(self, bits: int) -> model_pb2.ModelProfile:
        """The profile with weights of `bits` bits, one of WIDTHS."""
        shape = self.shapes | self.shapes["widths"][str(bits)]
        return profile_of({name: _long(shape[name]) if name in LISTS else shape[name] for name in _kept()})

    def read_share(self, bits: int) -> float:
        """The part of its layers' bytes that a step of one row reads: less than 1 of a mixture of experts."""
        shape = self.shapes["widths"][str(bits)]
        return sum(_long(shape["read_bytes"])) / sum(_long(shape["layer_bytes"]))


def _kept() -> Iterable[str]:
    return ("layers", *(name for name in LISTS if name != "read_bytes"), *NUMBERS)


def profile_of(shape: Mapping[str, Any]) -> model_pb2.ModelProfile:
    """The message for a profile as `node.engine.profile` and its like give it: None is 0."""
    made = model_pb2.ModelProfile(model_type="known", digest="0" * 64)
    for name in _kept():
        value = shape[name]
        if name in LISTS:
            getattr(made, name).extend(one or 0 for one in value)
        else:
            setattr(made, name, value or 0)
    return made


def _long(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [value for count, value in runs for _ in range(count)]


@functools.cache
def known_models() -> tuple[Known, ...]:
    """The models of the list, smallest first."""
    rows = json.loads(resources.files(__package__).joinpath("models.json").read_text("utf-8"))
    found = (Known(row.pop("id"), row.pop("parameters"), row.pop("source"), row) for row in rows)
    return tuple(sorted(found, key=lambda one: one.parameters))


def hub_id(name: str) -> str:
    """The id on the Hugging Face hub of the model of the list with this name, empty without one."""
    return next((one.id for one in known_models() if one.name.lower() == name.lower()), "")


def find_known(text: str) -> tuple[Known, int | None]:
    """The model of this id or name, and its bits where the name says them, as those of mlx-community do.

    Raises NotFound (MODEL_NOT_LISTED), with the models of like names.
    """
    widths = _WIDTH.findall(text)
    bits = int(widths[-1] or 16) if widths else None
    wanted = _plain(_WIDTH.sub("", text))
    names = {_plain(_WIDTH.sub("", one.id)): one for one in known_models()}
    by_name = {_plain(_WIDTH.sub("", one.name)): one for one in known_models()}
    found = names.get(wanted) or by_name.get(wanted.rpartition("/")[2])
    if found is None:
        close = difflib.get_close_matches(wanted.rpartition("/")[2], by_name, n=_CLOSE, cutoff=0.5)
        shown = "".join(f"{by_name[one].name}, " for one in close)
        raise NotFound(
            f"{text[:80]} is not among the {len(names)} models whose sizes are known here",
            hint=f"{shown}or a folder; all: sealring model fits",
            reason="MODEL_NOT_LISTED",
        )
    own = _plain(text).rpartition("/")[2] == _plain(found.name)  # which may end in BF16
    return found, bits if bits in WIDTHS and not own else None


def _plain(text: str) -> str:
    return text.strip("/ ").lower().removesuffix("-instruct").removesuffix("-it")
