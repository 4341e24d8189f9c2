"""Components in the foreground: the exit status for each way in which they end."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Self

import pytest
import typer

from sealring.cli.local.foreground import run_cluster, signals_as_exceptions
from sealring.cli.terminal.exit_codes import INTERRUPTED
from sealring.cli.terminal.host import Host

pytestmark = pytest.mark.usefixtures("signals")


class Cluster:
    """Serves until a signal, or ends by itself."""

    def __init__(self, *, ends: bool = False) -> None:
        self.ends, self.did = ends, list[str]()

    async def __aenter__(self) -> Self:
        self.did.append("begun")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.did.append("left")

    async def wait_for_end(self) -> None:
        self.did.append("serves")
        if not self.ends:
            await asyncio.Event().wait()


def signalled(number: int) -> Any:
    async def work(*_: object) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    return work


async def nothing(*_: object) -> None:
    return


def run(cluster: Cluster, work: Any, **options: Any) -> None:
    made: Any = cluster
    run_cluster(Host(), lambda say: made, work, what="starting", **options)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, INTERRUPTED),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_a_signal_before_it_serves_is_the_exit_status(
    capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    cluster = Cluster()
    with pytest.raises(typer.Exit) as ended:
        run(cluster, signalled(number))
    assert ended.value.exit_code == status
    assert cluster.did == ["begun", "left"]
    assert capsys.readouterr().err == "starting\nstopped\n"


def test_what_is_cancelled_without_a_signal_counts_as_interrupted() -> None:
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    with pytest.raises(typer.Exit) as ended:
        run(Cluster(), cancelled)
    assert ended.value.exit_code == INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_it_serves_a_signal_is_its_normal_end(capsys: pytest.CaptureFixture[str], number: int) -> None:
    cluster = Cluster()
    run(cluster, nothing, meanwhile=signalled(number))
    assert cluster.did == ["begun", "serves", "left"]
    assert capsys.readouterr().err.endswith("stopped\n")


def test_what_ends_by_itself_or_shall_not_serve_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    ended, once = Cluster(ends=True), Cluster()
    run(ended, nothing)
    run(once, nothing, serve=False)
    assert (ended.did, once.did) == (["begun", "serves", "left"], ["begun", "left"])
    assert capsys.readouterr().err == "starting\nstopping\n" * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_all_of_it_unwinds_what_was_begun(number: int) -> None:
    signals_as_exceptions()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
