"""The transcripts beside this file: what commands print, ask of the coordinator and exit with."""

from __future__ import annotations

import ast
import dataclasses
import platform
import re
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import pytest
from appletest import GOOD
from bundles import SigningCluster
from commands import Asker, Coordinator, Machine
from doctortest import FakeSystem, recording
from nacl.signing import SigningKey
from receiptkit import NONCE, written
from rosterkit import NOW
from transcripts import Scene, Section, Stage, find_sections

from sealring.cli.calls.asking import Question, TimedAnswer
from sealring.cli.local.output import own_command
from sealring.cli.terminal.output import moment
from sealring.doctor.system import Printed as Said
from sealring.mesh.crypto import Ed25519Signer
from sealring.mesh.errors import NotFound, PermissionDenied, ResourceExhausted, Unavailable
from sealring.mesh.member import JoinToken, Offer
from sealring.mesh.pki import Role
from sealring.mesh.receipt.statement import Earlier
from sealring.mesh.system.networks import OwnAddress
from sealring.mesh.system.paths import state_root_of
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.models.folders import bundled_model
from sealring.testing import PaperCluster
from sealring.testing.authority import Authority
from sealring.v1 import admin_pb2, membership_pb2

FOLDER = Path(__file__).with_name("transcripts")
ROOT = Path(__file__).parents[2]


TOKEN = JoinToken.generate(bytes(32), ["127.0.0.1:1"])
OFFERS = {
    "attic": Offer(bytes(range(32)), "attic", ("10.0.0.1:7701",)),
    "cellar": Offer(bytes(32), "cellar", ("10.0.0.2:7701",)),
}


def enrolled(stage: Stage, name: str = "mac", members: str = "3") -> None:
    """A machine that joins is enrolled as m1 in the cluster attic, which then has this number of members."""
    one = SimpleNamespace(level="software")
    roster = SimpleNamespace(member=lambda member: one, members=[one] * int(members))
    peer = SimpleNamespace(id="m1", cluster="attic")
    stage.host.enrolled = SimpleNamespace(state=SimpleNamespace(peer=peer, name=name), roster=roster)


def offers(stage: Stage, *clusters: str) -> None:
    """These clusters are found on the network. 1234567 is the join code of each, and TOKEN what it gets."""
    stage.names["TOKEN"] = TOKEN.format()
    stage.host.offers = [OFFERS[name] for name in clusters]
    stage.host.tokens = {
        "1234567": TOKEN,
        "7654323": ResourceExhausted("wait", reason="CODE_WAIT", retry_after=2),
    }
    for code, left, more in (("7654321", 4, {}), ("7654322", 2, {"retry_after": 3}), ("7654324", 0, {})):
        stage.host.tokens[code] = PermissionDenied(
            "it is wrong", reason="WRONG_CODE", tries_left=left, **more
        )


def first_machine(stage: Stage) -> None:
    SigningCluster(stage.home).save(state_root_of(stage.home) / "coordinator/operator", Role.OPERATOR)


def other_machine(stage: Stage) -> None:
    SigningCluster(stage.home).save(state_root_of(stage.home) / "node", Role.MEMBER)


def planner(stage: Stage) -> None:
    """The coordinator plans every model on node a."""

    def planned(request: Any) -> admin_pb2.DeploymentPlan:
        ring = admin_pb2.RingPlan(
            ring="m-0", stages=[admin_pb2.StagePlan(member="a", member_name="a", end_layer=4)]
        )
        return admin_pb2.DeploymentPlan(spec=request.spec, rings=[ring])

    stage.answer("PlanDeployment", lambda asked: admin_pb2.PlanDeploymentResponse(plan=planned(asked)))
    stage.answer("CreateDeployment", lambda asked: admin_pb2.CreateDeploymentResponse(plan=planned(asked)))


def ends_soon(stage: Stage) -> None:
    assert stage.coordinator is not None
    stage.coordinator.root = SimpleNamespace(ends=time.time() + 30 * 86_400.5, ends_soon=lambda now: True)  # type: ignore[assignment]


def check(stage: Stage, *changes: str) -> None:
    """What comparing a model with its stages comes to: nothing wrong but these."""
    report: dict[str, Any] = {
        "model_type": "llama",
        "layers": 3,
        "stages": [[0, 2], [2, 3]],
        "weights": "random",
    }
    report |= {
        "exact": True,
        "tokens_equal": True,
        "alone_equal": True,
        "right": True,
        "max_abs_diff": 0.0,
        "same": True,
    }
    report |= {
        "longest": 98,
        "reach": 64,
        "wrong_cuts": [],
        "code": "mlx_lm.models.llama",
        "package": "mlx-lm 1",
    }
    report |= {"crosses": ["hidden float32[64]"], "rows_together": True, "kv_bits": [8, 4], "prefixes": "any"}
    report |= {"drafts": True, "mtp": False, "drafters": [], "calls": "", "thoughts": False}
    changed = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in changes)}
    stage.host.reports["check"] = report | {"template": None} | changed


def mac(stage: Stage, *answers: str) -> None:
    """A Mac that says nothing but these answers of a System."""
    given = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in answers)}
    stage.names["python VERSION"] = f"python {platform.python_version()}"
    stage.host.examined = FakeSystem(**{"now": 1_800_000_000} | given)


def says(stage: Stage, command: str, said: str) -> None:
    """What the machine answers to a command: a recording, or these words."""
    text = recording(said) if said.endswith((".txt", ".json")) else said
    stage.host.examined.says[command] = Said(text, "status 1") if "codesign" in command else text


def protected(stage: Stage) -> None:
    stage.host.examined.answers["posture"] = GOOD


def asker(stage: Stage, end: str = "") -> None:
    """The gateway that `chat` asks answers Paris; with `stops` Ctrl-C comes in the midst of the answer."""
    stage.names["PIN"] = "ab" * 32

    class Noting(Asker):
        async def ask(self, question: Question, on_text: Any, **more: Any) -> TimedAnswer:
            target = self.targets[-1]
            sealed = "in clear" if target.pin is None else f"sealed for {target.pin.hex()}"
            said = "; ".join(f"{role}: {_shown(content)}" for role, content in question.messages)
            wanted = {"model": question.model, "tokens": question.max_tokens, "trust": question.min_trust}
            wishes = "".join(f", {name} {value}" for name, value in wanted.items() if value)
            assert not any(target.access.values())
            stage.effects.append(f"asks {' '.join(target.addresses)} {sealed}{wishes}: {said}")
            return await super().ask(question, on_text, **more)

    stage.host.asker = Noting()
    stage.host.asker.end = KeyboardInterrupt() if end else None


def _shown(content: Any) -> str:
    return content if isinstance(content, str) else f"{content[0][1:4].decode()} picture, {content[1]}"


class Played:
    """A cluster on this machine that starts nothing: two stages with one link between them."""

    grpc_address, http_url = "127.0.0.1:5", "http://127.0.0.1:6"

    def __init__(self, stage: Stage, state: Path, model: Path, *, nodes: int, name: str, say: Any) -> None:
        self.state_dir, self.name, self.operator_bundle = state, name, stage.home / "bundle"
        self._note = stage.effects.append
        if state.is_absolute():
            stage.names["TEMPORARY"] = str(state)
        self._note(f"runs {nodes} nodes with {model} as {name} in {state}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._note("leaves")

    async def start(self) -> None: ...

    async def deploy(
        self, say: Any = None, *, stages: int, name: str = "demo", model: str = ""
    ) -> admin_pb2.Deployment:
        self._note(f"deploys {name} in {stages} stages")
        plans = [
            admin_pb2.StagePlan(rank=0, member_name="node-0", first_layer=0, end_layer=3, trust=10),
            admin_pb2.StagePlan(rank=1, member_name="node-1", first_layer=3, end_layer=4, trust=30),
        ]
        plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring="demo-0", stages=plans, min_trust=10)])
        link = membership_pb2.LinkInfo(from_rank=0, to_rank=1, suite="hybrid")
        ring = admin_pb2.RingStatus(ring="demo-0", epoch=2, links=[link])
        return admin_pb2.Deployment(plan=plan, rings=[ring])

    async def wait_for_end(self) -> None:
        self._note("serves")


def local_cluster(stage: Stage) -> None:
    """`demo` gets a `Played` cluster, and its questions are answered."""
    asker(stage)
    signed = SigningCluster(stage.home)
    stage.names |= {
        "PIN": signed.authority.root.fingerprint.hex(),
        "MODELS": str(bundled_model().parents[1]),
        "SEALRING": own_command(),
    }
    stage.host.machine = partial(Played, stage)


def first_node(stage: Stage, *lacking: str) -> None:
    """A first machine that starts nothing, to which a second one comes; with `lacking` nobody has a model."""
    stage.host.coordinator = Coordinator()

    class Noting(Machine):
        def __init__(self, state: Path, settings: Any, *, say: Any) -> None:
            super().__init__(state, settings, say=say)
            if lacking:
                self.admin.answers["CreateDeployment"] = NotFound("no node has it", reason="MODEL_NOT_FOUND")

        async def code(self, **wanted: Any) -> Any:
            hidden = " and is not announced" * self.settings["coordinator"]["hidden"]
            stage.effects.append(f"runs in {self.state_dir}{hidden}")
            stage.effects.append(f"has a code: {wanted}")
            return await super().code(**wanted)

    stage.host.machine = Noting


def door_has_keys(stage: Stage) -> None:
    stage.host.machine.key = ""


def address(stage: Stage, host: str) -> None:
    stage.host.addresses = [OwnAddress(host, "en0")]


def no_multicast(stage: Stage) -> None:
    told = Unavailable("multicast DNS cannot be used: SAID", hint="ALLOW", reason="NO_MULTICAST")
    stage.host.unsent = told


def grows(stage: Stage, file: str, *lines: str) -> None:
    """A file gets one line more at each look, and then Ctrl-C comes."""

    def append(line: str) -> None:
        with (stage.home / file).open("a") as opened:
            opened.write(f"{line}\n")

    stage.host.pauses = iter([*(partial(append, line) for line in lines), None])


def edge(stage: Stage, key: str = "") -> None:
    """An edge at URL with the model demo, which asks for the key if there is one."""

    class Edge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers.get("authorization") == f"Bearer {key}"
            self.send_response(200 if right or not key else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "demo", "context_length": 4096}]}')

        def log_message(self, *_: Any) -> None: ...

    server = stage.closing.enter_context(HTTPServer(("127.0.0.1", 0), Edge))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stage.closing.callback(thread.join)
    stage.closing.callback(server.shutdown)
    stage.names["URL"] = f"http://127.0.0.1:{server.server_port}"


def paper(stage: Stage) -> None:
    """The coordinator's roster and root are in roster.dsse and root.dsse, its next roster in next.dsse, an
    operator's bundle in own, and a bundle of another cluster in other."""
    found = PaperCluster()
    while not found.roster.rings[0].members[0].id < found.roster.rings[0].members[1].id:
        found = PaperCluster()
    ids, first = [one.id for one in (*found.roster.rings[0].members, *found.roster.gateways)], found.roster
    signed = SigningCluster(stage.home / "other")
    signed.save(stage.home / "other", Role.OPERATOR)
    signed.authority.root = found.root
    signed.save(stage.home / "own", Role.OPERATOR)
    told = admin_pb2.GetAdminRosterResponse(root_metadata=found.root_chain, roster=found.envelope)
    stage.answer("GetRoster", lambda _: told)
    for name, content in (("roster", found.envelope), ("root", found.root_chain)):
        (stage.home / f"{name}.dsse").write_bytes(content)
    found.publish(members=tuple(dataclasses.replace(one, trust=10) for one in found.draft.members))
    (stage.home / "next.dsse").write_bytes(found.envelope)
    stage.names |= {
        "PIN": found.pin,
        "HEAD": ids[0],
        "TAIL": ids[1],
        "GATEWAY": ids[2],
        "STRANGER": "ab" * 32,
        "HASH": first.hash.hex(),
        "HASH-16": first.hash.hex()[:16],
    }
    stage.host.now = lambda now=time.time(): now  # type: ignore[method-assign]
    times = {"ISSUED": 0, "EXPIRES": 600, "ATTESTED": -10, "CHALLENGED": -5}
    for name, after in times.items():
        at = first.issued + after
        stage.names |= {name: moment(at), str(1_800_000_000 + after): str(at)}


def offline(stage: Stage) -> None:
    """A cluster's chain is in root.dsse, its root key in root.key. Root and roster keys are not random, so
    that the ids of those who signed have one order."""
    seeds = count()
    made_next = patch.object(SigningKey, "generate", lambda: SigningKey(bytes([next(seeds)]) * 32))
    stage.closing.enter_context(made_next)
    root = Ed25519Signer.create(stage.home / "root.key")
    made = PaperCluster(authority=Authority.create("paper", now=time.time(), root_signers=[root]))
    (stage.home / "root.dsse").write_bytes(made.root_chain)
    stage.host.now = time.time  # type: ignore[method-assign]
    stage.numbers = True


def receipt(stage: Stage, given: str = "") -> None:
    """An answer with its receipt, what asked for it, and the receipt alone; with `given` a part of it was
    computed in an earlier epoch."""
    found = PaperCluster(size=3, rest=TrustLevel.SOFTWARE, clock=lambda: NOW)
    changes = {"given": 2, "earlier": (Earlier("demo-0", 3, 2),)} if given else {}
    written(stage.home, found, **changes)
    ids = [one.id for one in found.roster.rings[0].members]
    stage.names |= dict(zip(("HEAD", "MIDDLE", "TAIL"), ids, strict=True))
    stage.names |= {"PIN": found.pin, "NONCE": NONCE.hex(), "STRANGER": "ab" * 32, "ANSWERED": moment(NOW)}


NAMED = (
    *(asker, first_node, door_has_keys, address, no_multicast, grows, mac, says, protected, enrolled),
    *(edge, local_cluster, paper, offline, receipt, offers, first_machine, other_machine, planner),
    *(ends_soon, check),
)
SCENES: dict[str, Scene] = {one.__name__.replace("_", "-"): one for one in NAMED}


@pytest.mark.parametrize("section", find_sections(FOLDER), ids=lambda one: f"{one.file.stem}: {one.title}")
def test_a_transcript(
    section: Section,
    home: Path,
    host: Any,
    here: Any,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = Stage(home, host, here, SCENES).play(section)
    if pytestconfig.getoption("--update", default=False):
        section.update(shown)
    else:
        assert shown.splitlines() == section.text.splitlines(), "pytest --update writes what came out"


MOMENT = re.compile(r"\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?[+-]\d\d:?\d\d|Z| UTC)")


def test_no_command_tells_people_a_moment_by_another_clock_than_theirs() -> None:
    """Local time, or how long it is until then, by one function; JSON has Unix seconds."""
    shown = [(file.name, line) for file in FOLDER.glob("*.txt") for line in file.read_text().splitlines()]
    assert not [one for one in shown if one[1][:2] in ("| ", "! ") and MOMENT.search(one[1])]
    made = re.compile(r"isoformat|strftime|ctime\(|UTC|gmtime")
    found = {
        str(file.relative_to(ROOT))
        for folder in ("cli", "mesh", "doctor", "coordinator")
        for file in (ROOT / folder).rglob("*.py")
        if made.search(file.read_text())
    }
    assert sorted(found) == [
        "cli/calls/usage.py",  # a day
        "cli/commands/bugreport.py",  # the name of a file
        "cli/terminal/output.py",
        "mesh/pki/authority.py",  # certificates
    ], "cli/terminal/output.py has moment and until"
