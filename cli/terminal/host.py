"""The object through which commands reach the world: clock, terminal, network, cluster and service manager.

Files, variables and programs need no methods here: HOME, the environment and PATH lead to them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from sealring.doctor.system import System
    from sealring.mesh.member.enrolment import Enrolled
    from sealring.mesh.system.networks import OwnAddress
    from sealring.node.identity.choice import IdentityChoice
    from sealring.node.settings import NodeSettings

START_SECONDS = 300.0
"""How long a component may take to begin. One that ends is noticed at once."""

SLOW_SECONDS, SLOW_START = (
    15.0,
    "still starting: macOS checks each library of a new installation when it is first loaded, which can "
    "take minutes",
)
"""What is said on a Mac, and after how long."""

P = ParamSpec("P")
T = TypeVar("T")


def host_of(context: typer.Context) -> Host:
    """The host that this call's command was given; by default this machine."""
    return context.find_object(Host) or Host()


def _tell(loop: Any, context: dict[str, Any]) -> None:
    """Says what failed in an event loop. gRPC also ends calls of an earlier loop in it, which is closed."""
    if "PollerCompletionQueue" not in repr(context.get("handle")):
        loop.default_exception_handler(context)


class Host:
    """This machine, its user and its cluster. A test replaces the whole object by its fake."""

    components: Sequence[str] = (sys.executable, "-P", "-m", "sealring.cli")
    """The program that runs a component. `-P`: modules never come from the working folder."""

    platform = sys.platform

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Blocks for `seconds`."""
        time.sleep(seconds)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, in an event loop of its own."""
        import asyncio

        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_tell)
            return runner.run(work)

    def become(self, arguments: Sequence[str]) -> NoReturn:
        """Replaces this process by `sealring ARGUMENTS`."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [*self.components, *arguments])  # noqa: S606 - itself

    @property
    def can_ask(self) -> bool:
        """Whether somebody sees a question on standard error and can answer it."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, question: str, **options: Any) -> Any:
        """The answer that the user types, with the options of `typer.prompt`; standard output may be JSON."""
        return typer.prompt(question, err=True, **options)

    async def line(self) -> str:
        """The next line that the user types, while other work goes on. A thread that reads could not be
        ended."""
        import asyncio

        loop, typed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sys.stdin, typed.set)
        try:
            await typed.wait()
        finally:
            loop.remove_reader(sys.stdin)
        return sys.stdin.readline()

    def choose(self, question: str, found: Sequence[object]) -> int:
        """The index of the one out of several that the user chooses."""
        from sealring.cli.terminal.output import say

        for number, one in enumerate(found, 1):
            say(f"  {number}  {one}")
        number = 0
        while not 1 <= number <= len(found):
            number = int(self.ask(question, default=1, type=int))
        return number - 1

    def own_addresses(self) -> list[OwnAddress]:
        """As `mesh.system.networks.own_addresses`."""
        from sealring.mesh.system.networks import own_addresses

        return own_addresses()

    def address_towards(self, host: str, port: int) -> str | None:
        """As `mesh.system.networks.address_towards`."""
        from sealring.mesh.system.networks import address_towards

        return address_towards(host, port)

    def listens(self, host: str, port: int) -> bool:
        """As `mesh.system.addresses.listens`."""
        from sealring.mesh.system.addresses import listens

        return listens(host, port)

    def is_free(self, host: str, port: int) -> bool:
        """As `mesh.system.addresses.is_free`."""
        from sealring.mesh.system.addresses import is_free

        return is_free(host, port)

    def identity(self, settings: NodeSettings) -> IdentityChoice:
        """As `node.identity.choice.choose_identity`."""
        from sealring.node.identity.choice import choose_identity

        return choose_identity(settings)

    def system(self) -> System:
        """What `sealring doctor` examines."""
        from sealring.doctor.system import System

        return System()

    def reach(self, one: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
        """The result of `one` with these arguments: whatever of this package leads to other processes, as
        `calls.operator.connect` or `local.cluster.LocalCluster`. A fake answers in its place."""
        return one(*arguments, **options)

    async def join(self, component: str, settings: Any, token: str) -> Enrolled:
        """Enrols a node or a gateway, as the `join` of its package."""
        if component == "gateway":
            from sealring.gateway.join import join as join_gateway

            return await join_gateway(settings, token)
        from sealring.node.join import join as join_node

        return await join_node(settings, token)
