import asyncio

from structlog.testing import capture_logs

from sealring.node.daemon.background import Background


async def test_a_task_that_fails_is_logged() -> None:
    background = Background()

    async def fails() -> None:
        raise ValueError("a fault")

    with capture_logs() as logs:
        background.start(fails())
        await background.idle()
    assert [(one["event"], type(one["exc_info"])) for one in logs] == [("daemon_task_failed", ValueError)]


async def test_tasks_end_with_the_daemon() -> None:
    background = Background()
    ended: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    background.start(waits())
    await asyncio.sleep(0)
    await background.stop()
    assert ended == [True]
