import asyncio

from sealring.node.daemon.rotation import StepGate


async def test_an_open_gate_lets_steps_through() -> None:
    gate = StepGate()
    async with asyncio.timeout(200):
        await gate.pass_step()


async def test_a_held_gate_tells_who_knocks_and_opens_when_all_let_go() -> None:
    gate = StepGate()
    with gate.held():
        with gate.held():
            knocking = asyncio.create_task(gate.knocked())
            step = asyncio.create_task(gate.pass_step())
            async with asyncio.timeout(200):
                await knocking
        await asyncio.sleep(0)
        assert not step.done()
    async with asyncio.timeout(200):
        await step
    with gate.held():
        again = asyncio.create_task(gate.knocked())
        await asyncio.sleep(0.01)
        assert not again.done()
        again.cancel()
