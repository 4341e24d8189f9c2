"""A node daemon whose head floods its gateway: `python flooding_node.py FILE ARGUMENTS`, as `sealring`.

FILE names the attack, or is empty. One begins with the next token of a row and goes on until the epoch ends
or FILE names another.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES
from sealring.node.control import service
from sealring.v1 import control_pb2, engine_pb2, inference_pb2

_ATTACK = Path(sys.argv[1])
_LARGE = "x" * (1 << 20)
_PIECE = 3 << 20
"""Bytes of a piece: more than an honest head sends at once."""

_LOOK_EVERY = 16
"""Messages after which an attack looks whether it is still wanted."""

_FORWARDED = b"\x5a"
"""The first byte of ScheduleRequest.forwarded (11)."""


def messages(attack: str, deployment: str, done: control_pb2.StepDone) -> Iterator[bytes]:
    """The encoded responses of one attack, without end."""
    large = control_pb2.StepDone(
        step=done.step, outputs=[control_pb2.RowOutput(row=done.outputs[0].row)], more=True
    )
    small = control_pb2.StepDone(step=done.step, outputs=list(large.outputs) * 20_000, more=True)
    large.outputs[0].delta.text = _LARGE
    steps = {
        "flood": large.SerializeToString,
        "small": small.SerializeToString,
        "fields": lambda: fields(done.step),
    }
    if attack in steps:
        yield from itertools.repeat(
            nested(control_pb2.ScheduleResponse(done=control_pb2.StepDone()), steps[attack]())
        )
    for number in itertools.count(1):
        if attack == "pieces":
            sealed = inference_pb2.Envelope(sealed=bytes(MAX_ENVELOPE_BYTES))
            request = inference_pb2.GenerateRequest(model=deployment, envelope=sealed)
            forward = control_pb2.Forward(guest=number, number=1, key=str(number), request=request)
            whole = control_pb2.ScheduleResponse(forward=forward).SerializeToString()
            for start in range(0, len(whole), _PIECE):
                part = control_pb2.Piece(
                    data=whole[start : start + _PIECE], last=start + _PIECE >= len(whole)
                )
                yield control_pb2.ScheduleResponse(piece=part).SerializeToString()
        elif attack == "guests":
            prompt = inference_pb2.Envelope(clear=inference_pb2.Prompt(text=_LARGE))
            request = inference_pb2.GenerateRequest(model=deployment, envelope=prompt)
            forward = control_pb2.Forward(guest=number, number=1, key=str(number), request=request)
            yield control_pb2.ScheduleResponse(forward=forward).SerializeToString()
        else:
            yield control_pb2.ScheduleResponse(pong=control_pb2.Pong(sequence=number)).SerializeToString()


def fields(step: int) -> bytes:
    """A step of very many empty outputs; protobuf would take seconds to build it."""
    empty = control_pb2.StepDone(outputs=[control_pb2.RowOutput()]).SerializeToString()
    return control_pb2.StepDone(step=step).SerializeToString() + empty * (600 << 10)


def nested(message: Message, content: bytes) -> bytes:
    """A message with one empty field, encoded with this content in it."""
    size, length = len(content), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return message.SerializeToString()[:-1] + length + bytes([size]) + content


class Flooding(service.GatewayStream):
    def __init__(self, identifier: str, epoch: Any, *rest: Any) -> None:
        super().__init__(identifier, epoch, *rest)
        self._deployment = epoch.plan.deployment
        self._flood: asyncio.Task[None] | None = None

    def row_event(self, event: bytes) -> None:
        super().row_event(event)
        done = engine_pb2.EngineEvent.FromString(event).done
        attack = _ATTACK.read_text(encoding="utf-8")
        if attack and done.outputs and self._flood is None:
            self._flood = asyncio.get_running_loop().create_task(self._attack(attack, done))

    def take(self, request: bytes) -> bool:
        if request[:1] == _FORWARDED:
            service.log.info("flood_answered")
        return super().take(request)

    async def _attack(self, attack: str, done: control_pb2.StepDone) -> None:
        service.log.info(f"flood_of_{attack}")
        for number, message in enumerate(messages(attack, self._deployment, done)):
            if number % _LOOK_EVERY == 0 and _ATTACK.read_text(encoding="utf-8") != attack:
                break
            while self.behind:
                await asyncio.sleep(0.001)
            self._put(message)
            await asyncio.sleep(0)
        self._flood = None

    def close(self) -> None:
        super().close()
        if self._flood is not None:
            self._flood.cancel()


if __name__ == "__main__":
    service.GatewayStream = Flooding  # type: ignore[misc]
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from hasty import main

    sys.argv = ["sealring", *sys.argv[2:]]
    main()
