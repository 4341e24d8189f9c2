"""`sealring up`, over a first machine that starts nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Self

import pytest
from commands import Coordinator, quickly

from sealring.cli.commands.up import serve_model
from sealring.cli.terminal.output import moment
from sealring.mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.mesh.system.networks import OwnAddress
from sealring.v1 import admin_pb2, membership_pb2

EXPIRES = 1_800_000_000


class Machine:
    """A first machine with one node. It ends once its coordinator has answered for the last time."""

    coordinator_addresses, join_addresses = ("10.0.0.1:1", "10.0.0.2:1"), ["10.0.0.1", "10.0.0.2"]
    grpc_address, http_url, cluster = "127.0.0.1:2", "http://127.0.0.1:3", "attic (abcd-efgh)"
    operator_bundle, processes = Path("/bundle"), {"coordinator": 7}
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

    async def wait_for_end(self) -> None:
        while len(self.admin.calls("ListNodes")) < 6:
            await asyncio.sleep(1)


@pytest.fixture
def up(here: Any, host: Any, coordinator: Any) -> Any:
    host.machine = Machine
    return lambda *options: here("up", *options)


def test_it_says_what_was_chosen_what_to_type_elsewhere_and_what_happens(up: Any) -> None:
    done = up()
    assert done.status == 0
    assert Machine.made.asked == [{"uses": 16, "seconds": 3600}]
    assert done.out == "  sealring join\n  123-4567\n", "all that there is to type"
    lines = [line for line in done.err.splitlines() if line]
    begins = lines.index("starting the coordinator")
    assert [line.partition(":")[0] for line in lines[:begins]] == [
        *("addresses", "identity", "models", "trust")
    ]
    assert lines[begins + 1 :] == [
        "coordinator at 10.0.0.1:1, 10.0.0.2:1; gateway at http://127.0.0.1:3",
        f"logs: {Machine.made.state_dir / 'logs'}",
        f"On each other machine (16 at most, before {moment(EXPIRES)}) type:",
        "It finds this cluster, attic (abcd-efgh), and asks for this code:",
        "If it finds nothing: sealring join 10.0.0.1 or sealring join 10.0.0.2",
        "Then here, in another terminal: sealring deploy MODEL, and sealring chat",
        "(MODEL is a folder, a name on the Hugging Face hub, or demo, which is a small one to try it)",
        "Another code: sealring token code. Ctrl-C stops what runs on this machine.",
        "mac-2 has joined, trust level software",
        "mac-2 is online",
        "too many wrong join codes were typed: this one has ended (another: sealring token code)",
        "stopping",
    ]


def test_it_claims_no_search_that_cannot_find_it(up: Any, host: Any) -> None:
    host.unsent = Unavailable("multicast DNS cannot be used: SAID", hint="ALLOW", reason="NO_MULTICAST")
    done = up()
    assert done.out == "  sealring join 10.0.0.1 or sealring join 10.0.0.2\n  123-4567\n"
    assert "It finds" not in done.err
    assert "It asks for the code of this cluster, attic (abcd-efgh):" in done.err
    assert "It would find nothing: multicast DNS cannot be used: SAID (hint: ALLOW)" in done.err


def test_what_programs_read_of_it(up: Any) -> None:
    found = up("--json").data
    assert (found["join"], found["token_id"], found["expires"]) == ("sealring join sr1.x", "t", EXPIRES)
    assert (found["coordinator"], found["operator"]) == ("10.0.0.1:1", "/bundle")
    assert found["processes"] == {"coordinator": 7}
    assert (found["code"], found["cluster"]) == ("1234567", "attic (abcd-efgh)")


def test_a_cluster_is_announced_unless_it_is_not_to_be(up: Any, host: Any) -> None:
    host.addresses = [OwnAddress("10.0.0.1", "en0")]
    for options, announces, said in (
        ((), True, "while the join code is good, or a machine of the cluster is away"),
        (("--no-announce",), False, "no"),
    ):
        assert f"announced on this network: {said} (" in up(*options).err
        assert Machine.made.settings["coordinator"]["hidden"] is not announces


def test_the_home_folder_is_found_where_no_shell_does(up: Any, home: Path) -> None:
    (home / "kept").mkdir()
    assert up("--models=~/kept", "--models", ".").status == 0
    assert Machine.made.settings["node"]["models"] == [str(home / "kept"), str(home)]
    assert "there is no folder" in up("--models", "none").err


def serving(name: str) -> Any:
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name=name, model=name))
    ring = admin_pb2.RingStatus(ring=f"{name}-0", phase=membership_pb2.RING_PHASE_SERVING)
    return admin_pb2.ListDeploymentsResponse(deployments=[admin_pb2.Deployment(plan=plan, rings=[ring])])


def test_with_a_model_it_goes_on_until_that_is_served(host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The model does not fit on one machine, and a second one comes."""
    machine = Machine(Path("/state"), {}, say=print)
    none = admin_pb2.ListDeploymentsResponse()
    small = FailedPrecondition("demo needs 9 GiB more", reason="DOES_NOT_FIT")
    machine.admin.answers |= {
        "CreateDeployment": [small, admin_pb2.CreateDeploymentResponse()],
        "ListDeployments": [none, none, serving("demo")],
    }
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert [one.spec.model for one in machine.admin.calls("CreateDeployment")] == ["demo", "demo"]
    said = capsys.readouterr().err
    assert "demo is not served yet: demo needs 9 GiB more; it is tried again when another" in said
    assert 'demo is serving. Ask it in another terminal: sealring chat "..."' in said


def test_a_model_that_is_served_already_is_not_deployed_again(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(Path("/state"), {}, say=print)
    machine.admin.answers["ListDeployments"] = serving("demo")
    quickly(serve_model(machine, "demo"))  # type: ignore[arg-type]
    assert machine.admin.calls("CreateDeployment") == []
    assert "demo is serving" in capsys.readouterr().err


class Lacking(Machine):
    def __init__(self, state: Path, settings: Any, *, say: Any) -> None:
        super().__init__(state, settings, say=say)
        self.admin.answers["CreateDeployment"] = NotFound("no node has it", reason="MODEL_NOT_FOUND")


def test_a_model_that_cannot_be_served_does_not_end_the_cluster(up: Any, host: Any) -> None:
    host.machine = Lacking
    done = up("--model", "nothing")
    assert (done.status, "nothing is not served: no node has it [MODEL_NOT_FOUND]" in done.err) == (0, True)
    assert "mac-2 is online" in done.err
