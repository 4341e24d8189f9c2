import asyncio

from sealring.node.daemon.rotation import StepGate


async def test_an_open_gate_lets_steps_through() -> None:
    gate = StepGate()
    await asyncio.wait_for(gate.pass_step(), 1)


async def test_a_held_gate_tells_who_knocks_and_opens_when_all_let_go() -> None:
    gate = StepGate()
    with gate.held():
        with gate.held():
            knocking = asyncio.create_task(gate.knocked())
            step = asyncio.create_task(gate.pass_step())
            await asyncio.wait_for(knocking, 1)
        await asyncio.sleep(0)
        assert not step.done()
    await asyncio.wait_for(step, 1)
    with gate.held():
        again = asyncio.create_task(gate.knocked())
        await asyncio.sleep(0.01)
        assert not again.done()
        again.cancel()
