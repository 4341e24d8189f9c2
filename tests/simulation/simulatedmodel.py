"""A model whose answers are a pure function of prompt, choice and position, so that a test knows them all.

The cache of a row is the chain of hashes over its tokens. A member that computes with a wrong cache, token or
order of rows therefore samples a wrong token.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import model_pb2 as model

END = 0
"""The token that ends an answer."""

EMPTY = bytes(8)
"""The cache of no tokens."""

OVERHEAD = 1 << 20
"""What an engine holds beside its stage, in bytes."""

LOGITS_BYTES, LOGITS_ROWS = 36, 8
"""Memory of sampling: bytes for each of the vocabulary's tokens, and rows that are sampled at once."""

_SAY = re.compile(r"(?:^|\s)say:(\d+)(?:\s|$)")
_SPELT = re.compile(r"t([0-9a-f]{1,7})")


@dataclass(frozen=True)
class SimulatedModel:
    """Sizes in bytes, speeds in virtual seconds. Answers have `longest` tokens at most, with their end; a
    prompt with the word `say:N` is answered by N tokens and the end."""

    name: str = "simulated"
    layers: int = 6
    layer_bytes: int = 1 << 20
    embed_bytes: int = 1 << 18
    kv_bytes_per_token: int = 256  # of a layer
    row_bytes: int = 64  # of a layer
    mark_bytes: int = 0  # of a layer; 0: its caches can be cut
    context: int = 2048
    vocabulary: int = 1 << 10
    longest: int = 24
    load_seconds: float = 2.0
    profile_seconds: float = 0.2
    read_seconds: float = 0.002
    step_seconds: float = 0.004
    token_seconds: float = 0.0001
    draft_runs: int = 64
    guessed: float = 0.6
    """The share of drafts that are right."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.name} {self.layers} {self.layer_bytes}".encode()).hexdigest()

    def write(self, folder: Path) -> Path:
        """The model's folder in `folder`, as far as a daemon looks at it."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}")
        return path

    def profile(self) -> model.ModelProfile:
        """What an engine measures of it."""
        return model.ModelProfile(
            model_type="simulated",
            layers=self.layers,
            layer_bytes=[self.layer_bytes] * self.layers,
            embed_bytes=self.embed_bytes,
            head_bytes=self.embed_bytes,
            kv_bytes_per_token=[self.kv_bytes_per_token] * self.layers,
            kv_max_tokens=[0] * self.layers,
            state_bytes=[self.row_bytes] * self.layers,
            max_context=self.context,
            digest=self.digest,
            hidden_size=64,
            vocab_size=self.vocabulary,
            dtype="bfloat16",
            handoff_bytes_per_token=128,
            trimmable=not self.mark_bytes,
            not_quantizable="it is simulated",
        )

    def stage_bytes(self, lo: int, hi: int) -> int:
        """The weights of the layers [lo, hi)."""
        ends = (lo == 0) + (hi == self.layers)
        return (hi - lo) * self.layer_bytes + ends * self.embed_bytes

    def memory(self, stages: int, tokens: int) -> int:
        """Bytes of a machine that has one of `stages` and holds `tokens` in its caches."""
        layers = -(-self.layers // stages)
        whole = layers * (self.layer_bytes + tokens * self.kv_bytes_per_token)
        logits = LOGITS_BYTES * self.vocabulary * LOGITS_ROWS
        return whole + 2 * self.embed_bytes + logits + OVERHEAD

    def seconds(self, rows: int, tokens: int, share: float = 1.0) -> float:
        """The time of a step on a share of the layers."""
        return share * (self.step_seconds + self.token_seconds * rows * tokens)

    def times(self, share: float, max_rows: int, chunk: int) -> list[control.StepTime]:
        """The cost table of a stage."""
        shapes = [(1 << power, 1) for power in range(max(1, max_rows).bit_length())]
        shapes += [(1, tokens) for tokens in sorted({16, 64, chunk}) if 1 < tokens <= max(chunk, 16)]
        return [
            control.StepTime(
                rows=rows, tokens=tokens, microseconds=round(1e6 * self.seconds(rows, tokens, share))
            )
            for rows, tokens in shapes
        ]

    def tokens(self, text: str) -> list[int]:
        """One for each word. Words of an answer are its tokens again."""
        return [1 + (_hashed(word) - 1) % (self.vocabulary - 1) for word in text.split()]

    def length(self, text: str, choice: int) -> int:
        """The tokens of the answer, with its end."""
        if (said := _SAY.search(text)) is not None:
            return int(said[1]) + 1
        return 1 + _number(f"{text} {choice}".encode()) % self.longest

    def sample(self, cache: bytes, choice: int) -> int:
        """The token that follows, unless the answer ends."""
        return 1 + _number(cache, choice) % (self.vocabulary - 1)

    def answer(self, text: str, choice: int = 0, max_tokens: int = 0) -> tuple[str, int]:
        """The whole answer, and the number of its tokens with its end, if that comes."""
        cache = EMPTY
        for token in self.tokens(text):
            cache = after(cache, token)
        length = self.length(text, choice)
        most = min(length, max_tokens or length)
        pieces = []
        for _ in range(min(most, length - 1)):
            token = self.sample(cache, choice)
            pieces.append(spell(token))
            cache = after(cache, token)
        return "".join(pieces), most


@functools.lru_cache(maxsize=4096)
def _hashed(word: str) -> int:
    spelt = _SPELT.fullmatch(word)
    return int(spelt[1], 16) if spelt else zlib.crc32(word.encode())


def after(cache: bytes, token: int) -> bytes:
    """The cache once a token is computed."""
    return hashlib.blake2b(cache + struct.pack(">I", token), digest_size=8).digest()


def spell(token: int) -> str:
    """The text of a token."""
    return "" if token == END else f"t{token:x} "


def prompt_text(prompt: inference.Prompt) -> str:
    """The text of a prompt, by which a head looks up the answer."""
    kind = prompt.WhichOneof("input")
    if kind == "chat":
        return "\n".join(f"<{one.role}> {one.content}" for one in prompt.chat.messages) + "\n<assistant>"
    if kind == "tokens":
        return "".join(map(spell, prompt.tokens.ids))
    return str(prompt.text)


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as records and names have them."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def _number(data: bytes, choice: int = 0) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4, salt=struct.pack(">Q", choice)).digest())
