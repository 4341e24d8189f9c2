"""The object through which commands reach the world: clock, terminal, network, cluster and service manager.

Files, variables and programs need no methods here: HOME, the environment and PATH lead to them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from sealring.cli.calls.asking import Asker, Target
    from sealring.cli.calls.operator import Admin
    from sealring.cli.local.cluster import LocalCluster
    from sealring.cli.local.machines import FirstMachine, OtherMachine
    from sealring.cli.service.launchctl import Launchctl
    from sealring.doctor.system import System
    from sealring.mesh.member.enrolment import Enrolled
    from sealring.mesh.system.networks import OwnAddress
    from sealring.node.identity.choice import IdentityChoice
    from sealring.node.settings import NodeSettings

T = TypeVar("T")


def host_of(context: typer.Context) -> Host:
    """The host that this call's command was given; by default this machine."""
    return context.find_object(Host) or Host()


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

        return asyncio.run(work)

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

    def launchd(self) -> Launchctl:
        """The service manager. Raises FailedPrecondition (NOT_MACOS)."""
        from sealring.cli.service.launchctl import Launchctl

        return Launchctl(self)

    def run_apart(self, module: str, arguments: Sequence[str]) -> dict[str, Any]:
        """As `local.apart.ask_apart`."""
        from sealring.cli.local.apart import ask_apart

        return ask_apart(module, arguments)

    def local_cluster(self, *arguments: Any, **options: Any) -> LocalCluster:
        """The processes of `sealring demo`, with the arguments of `LocalCluster`."""
        from sealring.cli.local.cluster import LocalCluster

        return LocalCluster(*arguments, **options)

    def first_machine(self, *arguments: Any, **options: Any) -> FirstMachine:
        """The processes of `sealring up`, with the arguments of `FirstMachine`."""
        from sealring.cli.local.machines import FirstMachine

        return FirstMachine(*arguments, **options)

    def other_machine(self, *arguments: Any, **options: Any) -> OtherMachine:
        """The processes of `sealring join`, with the arguments of `OtherMachine`."""
        from sealring.cli.local.machines import OtherMachine

        return OtherMachine(*arguments, **options)

    def admin(
        self, bundle: Path, *, address: str | None, seconds: float
    ) -> AbstractAsyncContextManager[Admin]:
        """As `calls.operator.connect`."""
        from sealring.cli.calls.operator import connect

        return connect(bundle, address=address, seconds=seconds)

    def asking(self, target: Target, *, seconds: float) -> AbstractAsyncContextManager[Asker]:
        """As `calls.asking.asking`."""
        from sealring.cli.calls.asking import asking

        return asking(target, seconds=seconds)

    async def join(self, component: str, settings: Any, token: str) -> Enrolled:
        """Enrols a node or a gateway, as the `join` of its package."""
        if component == "gateway":
            from sealring.gateway.join import join as join_gateway

            return await join_gateway(settings, token)
        from sealring.node.join import join as join_node

        return await join_node(settings, token)
