"""Plans over machines that a file describes, with links and a model: no cluster is needed.

Planner and cost model are those of a cluster; only the source of their figures differs. The ranks of a tensor
ring are assumed to hold equal parts of each layer; nodes would measure them.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import MAX_VOCABULARY
from sealring.coordinator.planning.links import ASSUMED, Link, Network
from sealring.coordinator.planning.planner import plan
from sealring.coordinator.planning.shapes import Parts, shape_table
from sealring.coordinator.planning.specs import RANKS, check_spec
from sealring.coordinator.planning.speeds import IN_TURN, Rate
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.limits import MAX_CONTEXT, MAX_LAYERS, MAX_ROWS
from sealring.mesh.roster.model import TENSOR
from sealring.v1 import admin_pb2, model_pb2

MAX_BYTES = 1 << 20
MAX_MACHINES = 64
_MAX_LINKS = 256
_GIB, _GB, _GBIT = 1 << 30, 1e9, 1.25e8
_CHUNK_ON_METAL = 2048
"""Tokens of a prompt's longest chunk by which a Mac says it gains (`node/engine/device.py`)."""

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
_Tokens = Annotated[int, Field(ge=0, lt=1 << 32)]
_Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
_Times = Annotated[float, Field(ge=1, le=1e6)]
_Positive = Annotated[float, Field(ge=1e-6, le=1e9)]
_Amount = Annotated[float, Field(ge=0, le=1e9)]


def _by_rows(times: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Raises ValueError unless sizes begin with 1 at 1 and rise, and times do not fall."""
    if times and (len(times) < 2 or times[0] != (1, 1.0)):
        raise ValueError("begins with [1, 1] and has a second number of rows")
    if any(after[0] <= before[0] or after[1] < before[1] for before, after in pairwise(times)):
        raise ValueError("rows must rise, and times must not fall")
    return times


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ModelFile(BaseModel):
    """As `profile` of a plan in JSON, of which any field beyond these is left aside."""

    model_config = ConfigDict(strict=True)

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    layer_bytes: _Bytes | Annotated[list[_Bytes], Field(max_length=MAX_LAYERS)]
    kv_bytes_per_token: _Bytes | Annotated[list[_Bytes], Field(max_length=MAX_LAYERS)]
    kv_max_tokens: Annotated[list[_Tokens], Field(max_length=MAX_LAYERS)] = []
    state_bytes: Annotated[list[_Bytes], Field(max_length=MAX_LAYERS)] = []
    handoff_bytes_per_token: _Bytes
    embed_bytes: _Bytes = 0
    head_bytes: _Bytes = 0
    tied: bool = False
    max_context: Annotated[int, Field(ge=0, le=MAX_CONTEXT)] = 0
    vocab_size: Annotated[int, Field(ge=0, le=MAX_VOCABULARY)] = 0


class MachineFile(_Part):
    """One machine, or `count` alike that are called `name-1`, `name-2` and so on. `gb_per_s` is of weights
    at one row, `rows` has numbers of rows and times as long that their steps take. The others are as in
    `Rate`."""

    name: _Name
    usable_gib: _Positive
    gb_per_s: _Positive
    rows: Annotated[list[tuple[_Rows, _Times]], Field(max_length=MAX_ROWS), AfterValidator(_by_rows)] = []
    layer_us: _Amount = 0.0
    kv_gb_per_s: _Amount = 0.0
    metal: bool = False
    count: Annotated[int, Field(ge=1, le=MAX_MACHINES)] = 1


class WireFile(_Part):
    gbit_per_s: _Positive
    latency_us: _Amount


class LinkFile(WireFile):
    """A link of the file, between every two of these machines."""

    between: Annotated[list[_Name], Field(min_length=2, max_length=MAX_MACHINES)]


class SimulationFile(_Part):
    """The contents of a file for `--simulate`. `network` joins all machines that no link joins."""

    model: ModelFile
    machines: Annotated[list[MachineFile], Field(min_length=1, max_length=MAX_MACHINES)]
    links: Annotated[list[LinkFile], Field(max_length=_MAX_LINKS)] = []
    network: WireFile | None = None


def simulate(content: bytes, spec: admin_pb2.DeploymentSpec) -> admin_pb2.PlanDeploymentResponse:
    """The plan that `spec` would have, and the shapes beside it.

    Raises InvalidInput (BAD_SIMULATION) with what is wrong in the file, and what the planner raises.
    """
    try:
        read = SimulationFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise _bad(f"{where}: {first['msg'][:200]}") from None
    members = _machines(read)
    network = _network(read, {member.id for member in members})
    parts = _parts(read.model)
    checked = check_spec(spec)
    if checked.replicas > 1:
        raise _bad("one ring is simulated, and not several replicas")
    ranks = checked.stages if checked.strategy == TENSOR else 1
    made = plan(checked, parts[ranks], members, network)
    strongest = sorted(members, key=lambda one: (-one.room, one.id))
    table = shape_table(checked, parts, strongest, network, made)
    return admin_pb2.PlanDeploymentResponse(plan=made, shapes=table)


def _machines(read: SimulationFile) -> list[Candidate]:
    found = []
    for one in read.machines:
        rows = tuple(one.rows) or IN_TURN
        rate = Rate(_GB * one.gb_per_s, rows, one.layer_us / 1e6, _GB * one.kv_gb_per_s, one.metal)
        names = [one.name] if one.count == 1 else [f"{one.name}-{number + 1}" for number in range(one.count)]
        chunk = _CHUNK_ON_METAL if one.metal else 0
        found += [
            Candidate(name, name, int(_GIB * one.usable_gib), 1, rate=rate, longest_chunk=chunk)
            for name in names
        ]
    if len({one.id for one in found}) < len(found):
        raise _bad("two machines have the same name")
    if len(found) > MAX_MACHINES:
        raise _bad(f"{len(found)} machines are more than {MAX_MACHINES}")
    return found


def _network(read: SimulationFile, known: set[str]) -> Network:
    links = {}
    for one in read.links:
        if not set(one.between) <= known:
            raise _bad(f"a link names {sorted(set(one.between) - known)[0]}, which is no machine")
        for pair in combinations(one.between, 2):
            links[frozenset(pair)] = _link(one)
    return Network(_link(read.network) if read.network else ASSUMED, links)


def _link(wire: WireFile) -> Link:
    return Link(wire.latency_us / 1e6, wire.gbit_per_s * _GBIT)


def _parts(model: ModelFile) -> Parts:
    """Profiles of the whole model, and of one rank's part: a part of each layer, and the rest whole."""
    weights, caches = _each(model, model.layer_bytes), _each(model, model.kv_bytes_per_token)
    windows, states = _each(model, model.kv_max_tokens or 0), _each(model, model.state_bytes or 0)
    return {
        ranks: model_pb2.ModelProfile(
            model_type="simulated",
            layers=model.layers,
            layer_bytes=[-(-one // ranks) for one in weights],
            kv_bytes_per_token=[-(-one // ranks) for one in caches],
            kv_max_tokens=windows,
            state_bytes=[-(-one // ranks) for one in states],
            embed_bytes=model.embed_bytes,
            head_bytes=model.head_bytes,
            tied=model.tied,
            max_context=model.max_context,
            vocab_size=model.vocab_size,
            handoff_bytes_per_token=model.handoff_bytes_per_token,
            digest="0" * 64,
        )
        for ranks in (1, *RANKS)
    }


def _each(model: ModelFile, value: int | list[int]) -> list[int]:
    values = [value] * model.layers if isinstance(value, int) else value
    if len(values) != model.layers:
        raise _bad(f"model: {len(values)} sizes for {model.layers} layers")
    return values


def _bad(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        hint="docs/operators.md, What a purchase would bring, has an example",
        reason="BAD_SIMULATION",
        param="simulate",
    )
