"""The commands of `sealring`, the command lines that texts show, and a host for commands to run on."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import selectors
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TypeVar

from google.protobuf.message_factory import GetMessageClass
from typer._click.exceptions import BadOptionUsage, MissingParameter, NoArgsIsHelpError
from typer.main import get_command

from sealring.cli.calls.asking import Question, Target, TimedAnswer, asking
from sealring.cli.calls.operator import connect
from sealring.cli.local.cluster import LocalCluster
from sealring.cli.local.machines import FirstMachine, OtherMachine, StandbyMachine
from sealring.cli.main import app
from sealring.cli.service.launchctl import Launchctl, ServiceStatus
from sealring.cli.terminal.host import Host
from sealring.mesh.errors import Unavailable
from sealring.mesh.member import Offer, claimed_root, find_clusters, token_for
from sealring.mesh.member.discovery import reached
from sealring.mesh.system.addresses import format_address
from sealring.mesh.system.networks import OwnAddress
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.engine import ask_apart
from sealring.node.identity.choice import IdentityChoice
from sealring.v1 import admin_pb2

T = TypeVar("T")

_SHOWN = re.compile(r"(?:^ *|[`&|;>] *|\$ ?|bin/)sealring ((?:[^`#\n\\&|]|\\\n)+)", re.MULTILINE)
_SAID = re.compile(r"(?:^|[`:;,(]|\b(?:see|run|then|type)) ?sealring ([a-z][a-z-]*(?: [a-z][a-z-]*)?)")


ROOT: Any = get_command(app)


def commands() -> dict[str, Any]:
    """Every command by its words, for example "node join"."""
    return dict(_commands(ROOT, ()))


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from _commands(one, (*words, name))
        else:
            yield " ".join((*words, name)), one


def help_of(name: str) -> str:
    """What `sealring NAME --help` prints."""
    command = ROOT
    context = command.make_context("sealring", [], resilient_parsing=True)
    for word in name.split():
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    text: str = command.get_help(context)
    return text


def parse(line: str) -> None:
    """Has the command line `sealring LINE` parsed and not run; arguments may be missing.

    Raises typer's UsageError for a command, an option or a value that there is not.
    """
    words = shlex.split(line)
    command = ROOT
    context = None
    try:
        while True:
            context = command.make_context("sealring", words, parent=context)
            if not hasattr(command, "commands"):
                return
            name_at = (
                len(words) - len(context.args) - 1
            )  # a group takes its own options and the command's name
            _, command, words = command.resolve_command(context, words[name_at:])
    except (MissingParameter, NoArgsIsHelpError):
        return
    except BadOptionUsage as error:
        if "requires an argument" not in error.message:
            raise


def lines_shown(file: Path) -> list[str]:
    """What stands behind `sealring` at the start of a line or of a piece of code."""
    lines = [" ".join(found.replace("\\\n", " ").split()) for found in _SHOWN.findall(file.read_text())]
    return [line.partition(" > ")[0] for line in lines]


def commands_said(file: Path) -> set[str]:
    """The one or two words behind `sealring` in the strings of a source file that are no docstrings."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    strings = [
        one.value
        for one in nodes
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docstrings
    ]
    return {found for text in strings for found in _SAID.findall(text)}


class _Skipping(selectors.DefaultSelector):
    """Waits for no timer: `seconds` says how many were skipped."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout if timeout is None else 0)
        if not found and timeout:
            self.seconds += timeout
        return found


class _QuickLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return super().time() + self._skipping.seconds

    def run_in_executor(self, executor: Any, call: Any, *arguments: Any) -> Any:
        """The call's future, done already: while a thread worked, this loop would skip the timers."""
        future = self.create_future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def quickly(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, whose timers expire as soon as there is nothing else to do; for fakes alone."""
    with asyncio.Runner(loop_factory=_QuickLoop) as runner:
        return runner.run(work)


class Coordinator:
    """An Admin service that remembers the requests, and answers each method as a test says.

    An answer is a message, an exception, a list of answers of which the last stays, or a function of the
    request; without one it is an empty message.
    """

    address, root = "coordinator:1", None

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.seconds: float | None = None
        self.answers: dict[str, Any] = answers

    async def call(self, method: str, *, seconds: float | None = None, **fields: Any) -> Any:
        described = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name[method]
        fields.pop("wait_for_ready", None)
        request = GetMessageClass(described.input_type)(**fields)
        self.asked.append((method, request))
        self.seconds = seconds
        answer = self.answers.get(method)
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if callable(answer) and not isinstance(answer, type):
            answer = answer(request)
        if isinstance(answer, BaseException) or (
            isinstance(answer, type) and issubclass(answer, BaseException)
        ):
            raise answer
        return GetMessageClass(described.output_type)() if answer is None else answer

    def calls(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for name, request in self.asked if name == method]


class Asker:
    """Answers Paris, and remembers what it was asked, and where."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.asked: list[Question] = []
        self.end: BaseException | None = None
        self.receipt: dict[str, Any] = {}

    @asynccontextmanager
    async def open(self, target: Target) -> AsyncIterator[Self]:
        self.targets.append(target)
        yield self

    async def ask(
        self, question: Question, on_text: Callable[[str], None], *, on_reasoning: Any = None
    ) -> TimedAnswer:
        self.asked.append(question)
        on_text("Par\x1b[2Jis\t.\n")
        if self.end is not None:
            raise self.end
        sealed = self.targets[-1].pin is not None
        speed = {"ttft_s": 0.125, "tok_s": 40.0}
        told = {"sealed": sealed, "sealring_receipt": self.receipt}
        return TimedAnswer("demo", "r", 20, 5, 7, "stop", "Paris.", **told, **speed)


EXPIRES = 1_800_000_000
"""When the codes and tokens of a `Machine` end."""


class Machine:
    """A first machine with one node. It ends once its coordinator has answered for the last time."""

    coordinator_addresses, join_addresses = ("10.0.0.1:1", "10.0.0.2:1"), ["10.0.0.1", "10.0.0.2"]
    grpc_address, http_url, cluster = "127.0.0.1:2", "http://127.0.0.1:3", "attic (abcd-efgh)"
    operator_bundle, processes, key = Path("/bundle"), {"coordinator": 7}, "srk_x"
    made: Machine

    def __init__(self, state: Path, settings: Any, *, say: Any) -> None:
        self.state_dir, self.settings = state, settings
        nodes = [
            admin_pb2.Node(id=name, name=name, state=admin_pb2.NODE_STATE_ONLINE, level="software")
            for name in ("mac-1", "mac-2")
        ]
        one, both = (admin_pb2.ListNodesResponse(nodes=nodes[:count]) for count in (1, 2))
        self.answers: list[Any] = [one, Unavailable("busy"), both, both]
        info = admin_pb2.JoinCodeInfo
        codes = [info(uses=16), info(uses=15, wrong=5, used_up=True)]
        tokens: list[Any] = [admin_pb2.ListJoinTokensResponse(code=one) for one in codes]
        self.admin = Coordinator(ListNodes=self.answers, ListJoinTokens=tokens)
        self.asked: list[Any] = []
        Machine.made = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def start(self) -> None:
        before = os.umask(0o777)
        os.umask(before)
        assert before == 0o077, "what it makes is its owner's alone"

    async def code(self, **wanted: Any) -> Any:
        self.asked.append(wanted)
        return admin_pb2.CreateJoinCodeResponse(code="1234567", expires=EXPIRES)

    async def token(self, **wanted: Any) -> Any:
        assert wanted == self.asked[0]
        return admin_pb2.CreateJoinTokenResponse(token="sr1.x", token_id="t", expires=EXPIRES)

    async def lan(self) -> Any:
        urls = ["https://attic.local:8443/v1", "https://10.0.0.1:8443/v1"]
        return {"urls": urls, "key": self.key, "certificate": "/lan/sealring-lan.crt", "sha256": "AB CD"}

    async def wait_for_end(self) -> None:
        while len(self.admin.calls("ListNodes")) < 6:
            await asyncio.sleep(1)


class Launchd:
    """launchd: the verbs that it was asked for, and the services that it has loaded."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = {label: Path() for label in loaded}
        self.did: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.last_exit = "(never exited)"

    def _do(self, verb: str) -> None:
        self.did.append(verb)
        if verb in self.fails:
            raise self.fails[verb]

    def bootstrap(self, label: str, plist: Path) -> None:
        self._do("bootstrap")
        self.loaded[label] = plist

    def bootout(self, label: str) -> None:
        if label in self.loaded:
            self._do("bootout")
            del self.loaded[label]

    def kickstart(self, label: str) -> None:
        self._do("kickstart")

    def status(self, label: str) -> ServiceStatus:
        if label not in self.loaded:
            return ServiceStatus(label, loaded=False)
        pid = 4711 if self.last_exit.startswith("(") else None
        return ServiceStatus(label, True, "running", pid, self.last_exit)


class Became(SystemExit):
    """This process would have become another one."""


class FakeHost(Host):
    """A host with nothing around it but what a test puts there. Its clock runs only while somebody pauses.

    Where `coordinator`, `asker`, `services` or `machine` is None, the real one is reached.
    """

    def __init__(self) -> None:
        self.passed = 0.0
        self.pauses: Iterator[Any] = iter(())
        """Work to do while somebody pauses; None: Ctrl-C."""
        self.typed: list[Any] | None = None
        """Lines that a user types; None: there is no user."""
        self.became: list[list[str]] = []
        self.addresses: list[OwnAddress] = []
        self.way: str | None = "127.0.0.1"
        self.ports: set[int] = set()
        """Ports at which somebody listens."""
        self.identity_found = IdentityChoice(TrustLevel.SOFTWARE, None, "the key is in a file")
        self.joined: list[tuple[str, Any, str]] = []
        self.enrolled: Any = None
        self.coordinator: Any = None
        self.asker: Asker | None = None
        self.services: Launchd | None = None
        self.examined: Any = None
        self.reports: dict[str, Any] = {}
        self.ran: list[tuple[str, list[str]]] = []
        self.machine: Any = None
        self.offers: list[Offer] | None = None
        """Clusters that are found on the network, and those at an address; None: the network is looked at."""
        self.unsent: Unavailable | None = None
        """What multicast DNS of this machine meets."""
        self.tokens: dict[str, Any] = {}
        """Tokens, or errors, by the codes that get them."""
        self.shown_codes: list[tuple[Offer, str]] = []

    def monotonic(self) -> float:
        return self.passed

    def pause(self, seconds: float) -> None:
        self.passed += seconds
        work = next(self.pauses, lambda: None)
        if work is None:
            raise KeyboardInterrupt
        work()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return super().run(work) if self.coordinator is None else quickly(work)

    def become(self, arguments: Sequence[str]) -> NoReturn:
        self.became.append(list(arguments))
        raise Became(0)

    @property
    def can_ask(self) -> bool:
        return self.typed is not None

    def ask(self, question: str, **options: Any) -> Any:
        assert self.typed is not None
        return self.typed.pop(0)

    async def line(self) -> str:
        return f"{self.ask('')}\n"

    def own_addresses(self) -> list[OwnAddress]:
        return self.addresses

    def address_towards(self, host: str, port: int) -> str | None:
        return self.way

    def listens(self, host: str, port: int) -> bool:
        up = self.services is not None and bool(self.services.loaded)
        return port in self.ports or (up and "127.0.0.1" in host)

    def is_free(self, host: str, port: int) -> bool:
        return (
            host in ("127.0.0.1", "0.0.0.0", self.way, *(one.host for one in self.addresses))
            and port not in self.ports
        )

    def identity(self, settings: Any) -> IdentityChoice:
        return self.identity_found

    def system(self) -> Any:
        return super().system() if self.examined is None else self.examined

    def reach(self, one: Any, /, *arguments: Any, **options: Any) -> Any:
        if one is ask_apart:
            return self._ask_apart(*arguments)
        if one is connect and self.coordinator is not None:
            return _given(self.coordinator)
        if one is asking and self.asker is not None:
            return self.asker.open(arguments[0])
        if self.offers is not None and one in (find_clusters, claimed_root, token_for):
            return self._join(one, *arguments)
        if one is reached:
            return _sent(arguments[0], self.unsent)
        if one is Launchctl and self.services is not None:
            return self.services
        if one in (LocalCluster, FirstMachine, OtherMachine, StandbyMachine) and self.machine is not None:
            return self.machine(*arguments, **options)
        return super().reach(one, *arguments, **options)

    async def _join(self, one: Any, *arguments: Any) -> Any:
        assert self.offers is not None
        if one is find_clusters:
            return self.offers
        if one is claimed_root:
            address = format_address(*arguments)
            found = next((offer for offer in self.offers if address in offer.addresses), None)
            if found is None:
                raise Unavailable(f"{address} cannot be reached", reason="COORDINATOR_UNREACHABLE")
            return found.root_sha256, SimpleNamespace(cluster=found.name)
        self.shown_codes.append(arguments)
        answer = self.tokens[arguments[1]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask_apart(self, module: str, arguments: Sequence[str], *tell: Any) -> dict[str, Any]:
        self.ran.append((module.rpartition(".")[2], list(arguments)))
        found: dict[str, Any] | None = self.reports.get(module.rpartition(".")[2])
        return ask_apart(module, arguments, *tell) if found is None else found

    async def join(self, component: str, settings: Any, token: str) -> Any:
        if self.enrolled is None:
            return await super().join(component, settings, token)
        self.joined.append((component, settings, token))
        return self.enrolled


def _sent(hosts: list[str], error: Unavailable | None) -> list[str]:
    if error is not None:
        raise error
    return hosts


@asynccontextmanager
async def _given(one: T) -> AsyncIterator[T]:
    yield one
