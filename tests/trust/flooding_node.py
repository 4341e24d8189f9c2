"""A node daemon whose head floods its gateway: `python flooding_node.py FILE ARGUMENTS`, as `sealring`.

FILE names the attack, or is empty. One begins with the next token of a row and goes on until the epoch ends.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sealring.node.control import service
from sealring.v1 import control_pb2, engine_pb2, inference_pb2

_ATTACK = Path(sys.argv[1])
_LARGE = "x" * (1 << 20)


def messages(attack: str, deployment: str, done: control_pb2.StepDone) -> Iterator[dict[str, Any]]:
    """Fields of the responses of one attack, without end."""
    row = done.outputs[0].row
    for number in itertools.count(1):
        if attack == "flood":
            large = control_pb2.RowOutput(row=row, text=_LARGE)
            yield {"done": control_pb2.StepDone(step=done.step, outputs=[large], more=True)}
        elif attack == "small":
            small = [control_pb2.RowOutput(row=row)] * 20_000
            yield {"done": control_pb2.StepDone(step=done.step, outputs=small, more=True)}
        elif attack == "fields":
            empty = [control_pb2.RowOutput()] * (600 << 10)
            yield {"done": control_pb2.StepDone(step=done.step, outputs=empty)}
        elif attack == "guests":
            prompt = inference_pb2.Envelope(clear=inference_pb2.Prompt(text=_LARGE))
            request = inference_pb2.GenerateRequest(model=deployment, envelope=prompt)
            yield {"forward": control_pb2.Forward(guest=number, number=1, key=str(number), request=request)}
        else:
            yield {"pong": control_pb2.Pong(sequence=number)}


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

    async def _attack(self, attack: str, done: control_pb2.StepDone) -> None:
        for message in messages(attack, self._deployment, done):
            while self.behind:
                await asyncio.sleep(0.001)
            self.pass_on(**message)
            await asyncio.sleep(0)

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
