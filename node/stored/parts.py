"""Files of a stage, layer by layer: what is taken from them once another stage has some of the layers.

How many bytes each layer takes is in a table beside the files, under a MAC: a part that is cut in a wrong
place would be a wrong answer.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from sealring.mesh.system.files import write_atomic
from sealring.node.stored import codec
from sealring.node.stored.keys import expand, mac
from sealring.node.stored.places import LayerBytes, StageTable, Unit
from sealring.node.stored.store import TABLE_SUFFIX, Store
from sealring.v1 import engine_pb2

log = structlog.get_logger()

_MAC_BYTES = 32
_TABLE_BYTES = 1 << 20


def write_table(table: StageTable, model: Path, key: bytes) -> None:
    """Puts the table of the stage under this key into the model's folder. Raises OSError."""
    content = json.dumps([table.digest.hex(), table.layers, table.rest]).encode()
    write_atomic(_table_file(model, key), mac(key, content) + content)


def read_table(model: Path, key: bytes) -> StageTable | None:
    """The table of the stage under this key; None where there is none that the key has made."""
    try:
        with _table_file(model, key).open("rb") as file:
            data = file.read(_TABLE_BYTES)
    except OSError:
        return None
    content = data[_MAC_BYTES:]
    if not hmac.compare_digest(data[:_MAC_BYTES], mac(key, content)):
        return None
    digest, layers, rest = json.loads(content)
    return StageTable(bytes.fromhex(digest), tuple(map(_bytes_of, layers)), _bytes_of(rest))


def _bytes_of(told: tuple[int, list[tuple[int, int]]]) -> LayerBytes:
    token, held = told
    return LayerBytes(token, tuple((each, window) for each, window in held))


def _table_file(model: Path, key: bytes) -> Path:
    return model / f"{mac(key, b'layers').hex()[:16]}{TABLE_SUFFIX}"


@dataclass(frozen=True)
class Part:
    """The layers [first, end) of a stage's files, from 0 on. It is `brought` where another member had them:
    its files may not be here yet."""

    store: Store
    table: StageTable
    first: int
    end: int
    brought: bool = False

    @classmethod
    def of_stage(
        cls, root: Path, model: Path, key: bytes, first: int, end: int, setting: int | None = None
    ) -> Part | None:
        """A part of the stage under this key; None for a stage of which nothing was stored here."""
        table = read_table(model, key)
        if table is None or end > len(table.layers):
            return None
        return cls(Store(root, model, expand(key, table.digest), setting), table, first, end)

    def size(self, unit: Unit) -> int:
        return self.table.before(self.end, unit) - self.table.before(self.first, unit)

    def has(self, scope: bytes, unit: Unit) -> bool:
        """Whether these layers of a file are here. Layers that have windows alone are in no block."""
        return not self.size(unit) or self.store.exists(scope, unit.place)

    def read(self, scope: bytes, unit: Unit) -> memoryview | None:
        """These layers of a file; None for a miss."""
        if not self.size(unit):
            return memoryview(b"")
        content = self.store.read(scope, unit.place, self.table.size(unit))
        if content is None:
            return None
        at = self.table.before(self.first, unit)
        return content[at : at + self.size(unit)]


@dataclass(frozen=True)
class Former:
    """The files of a ring with other stages, as far as they are of a stage's layers: parts that have all of
    these, in order. `table` is that of the stage."""

    parts: Sequence[Part]
    table: StageTable

    def here(self, scope: bytes, unit: Unit) -> bool:
        """Whether this member has its own parts of a file. What others have is not known."""
        return all(part.brought or part.has(scope, unit) for part in self.parts)

    def lacks(self, scope: bytes, unit: Unit) -> bool:
        """Whether parts of a file are still to be brought."""
        return any(part.brought and not part.has(scope, unit) for part in self.parts)

    def read(self, scope: bytes, unit: Unit) -> memoryview | None:
        """The content of the stage's file, as if the stage had stored it; None for a miss."""
        content, at = codec.buffer(self.table.size(unit)), 0
        for part in self.parts:
            found = part.read(scope, unit)
            if found is None or at + len(found) > len(content):
                return None
            content[at : at + len(found)] = found
            at += len(found)
        rest = self.table.rest.size(unit)
        content[len(content) - rest :] = bytes(rest)
        return content if at + rest == len(content) else None


def former_of(disk: engine_pb2.PrefixDisk, table: StageTable | None, lo: int) -> dict[int, Former]:
    """What rings with other stages have stored of an engine's layers, which begin with `lo`, by their places
    in `disk`. The engine's own table is put beside its files, for stages that come after it."""
    if table is None:
        return {}
    root, model = Path(disk.root), Path(disk.model)
    size = disk.size if disk.HasField("size") else None
    try:
        write_table(table, model, disk.key)
    except OSError as error:
        log.warning("layers_not_noted", folder=str(root), why=error.strerror)
    found: dict[int, Former] = {}
    for number, former in enumerate(disk.former):
        parts = [
            brought(disk, one, table, lo)
            if one.member
            else Part.of_stage(
                root, model, one.key, one.first - one.stage_first, one.end - one.stage_first, size
            )
            for one in former.parts
        ]
        if all(parts):
            found[number] = Former([part for part in parts if part is not None], table)
    return found


def brought(disk: engine_pb2.PrefixDisk, one: engine_pb2.FormerPart, table: StageTable, lo: int) -> Part:
    """The place of layers that another member hands over. `table` is that of the engine's stage, whose first
    layer is `lo`."""
    store = Store(Path(disk.root), Path(disk.model), one.key, disk.size if disk.HasField("size") else None)
    return Part(store, table.some(one.first - lo, one.end - lo), 0, one.end - one.first, brought=True)
