"""`sealring deployment` and `sealring deploy`: requests to the coordinator, and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import deployment
from sealring.cli.terminal.output import moment, plain
from sealring.mesh.errors import InvalidInput
from sealring.v1 import admin_pb2, membership_pb2

ONLINE, OFFLINE = admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_OFFLINE
NODES = [
    ("a", ONLINE, ""),
    ("b", ONLINE, ""),
    ("c", ONLINE, "other-0"),
    ("d", OFFLINE, ""),
    ("e", ONLINE, ""),
]


def planned(request: Any) -> admin_pb2.DeploymentPlan:
    """Every model on node a."""
    stage = admin_pb2.StagePlan(member="a", member_name="a", end_layer=4)
    return admin_pb2.DeploymentPlan(spec=request.spec, rings=[admin_pb2.RingPlan(ring="m-0", stages=[stage])])


@pytest.fixture
def planner(coordinator: Any) -> Any:
    """A coordinator that plans every model on node a, where it then serves."""
    nodes = [
        admin_pb2.Node(id=name, name=name, state=state, rings=[admin_pb2.NodeRing(ring=ring)] if ring else [])
        for name, state, ring in NODES
    ]
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="m"))
    ring = admin_pb2.RingStatus(ring="m-0", phase=membership_pb2.RING_PHASE_SERVING)
    serving = admin_pb2.Deployment(plan=plan, rings=[ring])
    coordinator.answers = {
        "PlanDeployment": lambda asked: admin_pb2.PlanDeploymentResponse(plan=planned(asked)),
        "CreateDeployment": lambda asked: admin_pb2.CreateDeploymentResponse(plan=planned(asked)),
        "ListNodes": admin_pb2.ListNodesResponse(nodes=nodes),
        "ListDeployments": admin_pb2.ListDeploymentsResponse(deployments=[serving]),
    }
    return coordinator


@pytest.fixture
def deploy(here: Any, planner: Any) -> Any:
    def run(*arguments: str, serves: bool = True) -> Any:
        if not serves:
            planner.answers["ListDeployments"] = KeyboardInterrupt
        return here("deploy", "m", *arguments)

    return run


def test_shapes_are_shown_beside_a_plan_and_without_a_cluster(here: Any, tmp_path: Path) -> None:
    file = tmp_path / "purchase.json"
    machine = {"name": "mac", "count": 2, "usable_gib": 8, "gb_per_s": 100, "rows": [[1, 1], [11, 2]]}
    model = {"layers": 4, "layer_bytes": 1 << 28, "kv_bytes_per_token": 64, "handoff_bytes_per_token": 64}
    file.write_text(json.dumps({"model": model, "machines": [machine]}))
    shown = here("deployment", "plan", "--simulate", str(file))
    assert "pipeline *  mac-1" in shown.out, shown.err
    assert "tensor      mac-1+mac-2" in shown.out
    assert "assumed of links" in shown.out
    told = here("deployment", "plan", "--simulate", str(file), "--stages", "2", "--json").data
    assert [one["planned"] for one in told["shapes"]["shapes"]].count(True) == 1
    assert len(told["rings"][0]["stages"]) == 2
    for arguments, said in (
        (["m"], "--simulate goes without a model"),
        (["m", "--kv-bits", "8", "--or-pipeline"], "--simulate goes without kv_bits, or_pipeline"),
        (["--replicas", "2"], "--simulate goes without replicas"),
        (["--trust-floor", "hardware", "--replicas", "2"], "--simulate goes without trust_floor"),
    ):
        done = here("deployment", "plan", "--simulate", str(file), *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"error: {said} (hint: ")
    done = here("deployment", "plan", "--simulate", str(tmp_path / "none"))
    assert done.err == f"error: cannot read {tmp_path / 'none'}: No such file or directory [BAD_SIMULATION]\n"
    assert "MODEL_MISSING" in here("deployment", "plan").err
    file.write_text(" " * (1 << 20) + "{}")
    assert "FILE_TOO_LARGE" in here("deployment", "plan", "--simulate", str(file)).err


def test_it_says_how_many_nodes_are_left_out(deploy: Any) -> None:
    done = deploy()
    assert done.status == 0, done.err
    assert "m is serving" in done.err
    assert "2 more nodes are online" in done.err
    assert "2 online" not in deploy("--stages", "1").err, "it was asked for"


def test_ctrl_c_tells_that_the_deployment_goes_on(deploy: Any) -> None:
    done = deploy(serves=False)
    assert done.status == 130
    assert "goes on without this command" in done.err
    assert "sealring deployment delete m" in done.err


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """The lines that were printed, each space once."""
    return lambda: [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


GIB = 1 << 30


def make_stage(member: str, first: int, end: int, **fields: Any) -> admin_pb2.StagePlan:
    defaults = {"weight_bytes": 3 * GIB, "kv_bytes": GIB, "kv_budget": 2 * GIB, "memory_usable": 8 * GIB}
    return admin_pb2.StagePlan(
        **{"member": member, "first_layer": first, "end_layer": end, "trust": 10} | defaults | fields
    )


def test_a_plan_is_a_table_for_each_ring_and_the_reasons(told: Any) -> None:
    stages = [make_stage("a" * 52, 0, 4), make_stage("b" * 52, 4, 9, rank=1, member_name="mac", trust=30)]
    halves = [make_stage("a" * 52, 0, 9, member_name=name, rank=rank) for rank, name in enumerate("xy")]
    plan = admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(name="m", kv_bits=8, clear_links=True, backend="jaccl"),
        rings=[
            admin_pb2.RingPlan(ring="m-0", stages=stages, min_trust=10, pipeline=True),
            admin_pb2.RingPlan(ring="m-1", stages=halves, min_trust=20),
            admin_pb2.RingPlan(ring="m-2", stages=[make_stage("c" * 52, 0, 9, member_name="z")]),
        ],
        reasons=["because", "and so"],
    )
    deployment.print_plan(plan)
    columns = "rank node layers weights KV per row usable trust"
    assert told() == [
        "m: ring m-0, minimum trust software, KV in 8 bits",
        columns,
        f"0 {'a' * 16} 0-3 3.0 GiB 1.0 GiB 8.0 GiB software",
        "1 mac 4-8 3.0 GiB 1.0 GiB 8.0 GiB hardware",
        "m: ring m-1, minimum trust self_signed (a claim), KV in 8 bits, links in clear (jaccl)",
        columns,
        "0 x 0-8, 1/2 of each 3.0 GiB 1.0 GiB 8.0 GiB software",
        "1 y 0-8, 1/2 of each 3.0 GiB 1.0 GiB 8.0 GiB software",
        "m: ring m-2, minimum trust none, KV in 8 bits, links in clear (jaccl)",
        columns,
        "0 z 0-8 3.0 GiB 1.0 GiB 8.0 GiB software",
        "because",
        "and so",
    ]
    plan.spec.kv_bits, plan.spec.clear_links = 0, False
    deployment.print_plan(plan)
    assert told()[0] == "m: ring m-0, minimum trust software"


def test_shapes_are_told_with_what_they_would_bring(told: Any) -> None:
    machine, group = admin_pb2.ShapeMachine, admin_pb2.ShapeGroup
    one, two = (machine(name=name, memory=memory * GIB) for name, memory in (("one", 2), ("two", 3)))
    fast = {
        "one_request": 99.94,
        "eight_requests": 98,
        "full_batch": 100,
        "compute_ms": 7,
        "sums_ms": 0.25,
        "hops_ms": 3,
    }
    deployment.print_shapes(
        admin_pb2.ShapeTable(
            shapes=[
                admin_pb2.ShapeEstimate(
                    strategy="mixed",
                    planned=True,
                    rows=4,
                    groups=[group(machines=[one, two], layers=5), group(machines=[one], layers=4)],
                    **fast,
                ),
                admin_pb2.ShapeEstimate(strategy="pipeline", groups=[group(machines=[one], layers=9)]),
            ],
            reasons=["assumed of links: much"],
        )
    )
    assert told() == [
        "shapes, * as planned: estimated tokens/s, and ms of one row's step: compute + sums + hops",
        "shape machines layers memory at most rows one request eight full batch step",
        "mixed * one+two > one 5,4 3.0 GiB 4 99.9 98.0 100 7.0 + 0.2 + 3.0",
        "pipeline one 9 2.0 GiB 0 - - - -",
        "assumed of links: much",
    ]


def test_what_nodes_hold_before_and_after(told: Any) -> None:
    """Memory of nodes that are online. A deployment adds weights and caches."""
    plan = admin_pb2.DeploymentPlan(
        rings=[admin_pb2.RingPlan(ring="m-0", stages=[make_stage(one, 0, 9) for one in "ab"])]
    )
    place = admin_pb2.NodeRing(ring="x-0", memory=4 * GIB)
    nodes = [
        admin_pb2.Node(id="a", name="empty", state=ONLINE, memory_usable=8 * GIB, memory_overhead=GIB),
        admin_pb2.Node(
            id="b", name="full", state=ONLINE, memory_usable=8 * GIB, memory_overhead=GIB, rings=[place]
        ),
        admin_pb2.Node(id="c", name="other", state=ONLINE, memory_usable=8 * GIB, memory_used=5 * GIB),
        admin_pb2.Node(id="d", name="gone", state=OFFLINE, memory_usable=8 * GIB),
    ]
    deployment.print_change(plan, [plain(node) for node in nodes])
    assert told() == [
        "memory of nodes",
        "node usable before after free after ring",
        "empty 8.0 GiB 0 B 5.0 GiB 3.0 GiB m-0 0-8, 1/2 of each",
        "full 8.0 GiB 4.0 GiB 10.0 GiB 0 B x-0, m-0 0-8, 1/2 of each",
        "other 8.0 GiB 5.0 GiB 5.0 GiB 3.0 GiB -",
    ]


def test_deployments_are_listed_with_the_state_of_each_ring(told: Any) -> None:
    serving, down = membership_pb2.RING_PHASE_SERVING, membership_pb2.RING_PHASE_DOWN
    links = [membership_pb2.LinkInfo(suite=suite) for suite in ("s2", "s1", "s2")]
    spec = admin_pb2.DeploymentSpec(name="m", model="org/m", clear_links=True, speculate=True, stages=2)
    rings = [
        admin_pb2.RingStatus(ring="m-0", phase=serving, epoch=3, links=links, drafted=4, accepted=3),
        admin_pb2.RingStatus(ring="m-1", phase=down, reason="it broke"),
        admin_pb2.RingStatus(ring="m-2", phase=serving, epoch=1),
    ]
    one = admin_pb2.Deployment(
        plan=admin_pb2.DeploymentPlan(
            spec=spec, rings=[admin_pb2.RingPlan(ring="m-2", pipeline=True), admin_pb2.RingPlan(ring="m-0")]
        ),
        rings=rings,
    )
    one.plan.profile.trimmable = True
    unserved = admin_pb2.Deployment(created=1_800_000_000)
    unserved.plan.spec.name = "n"
    deployment.print_deployments([plain(one), plain(unserved)])
    assert told() == [
        "name model ring phase epoch suite created reason",
        "m org/m m-0 serving 3 s1, s2, layers' sums in clear - 3 of 4 guessed tokens right",
        "m org/m m-1 down 0 layers' sums in clear - it broke",
        "m org/m m-2 serving 1 - - -",
        f"n - - - - - {moment(1_800_000_000)} -",
    ]
    one.plan.spec.draft = "org/small"
    deployment.print_deployments([plain(one)])
    assert [line.split("- ")[-1] for line in told()[1:]] == [
        "org/small guesses, 3 of 4 guessed tokens right",
        "it broke",
        "org/small guesses",
    ]
    headed = admin_pb2.Deployment.FromString(one.SerializeToString())
    headed.plan.spec.draft = ""
    headed.plan.rings.add(ring="m-0").stages.add(draft_bytes=1)
    deployment.print_deployments([plain(headed)])
    assert any(line.endswith("mtp guesses, 3 of 4 guessed tokens right") for line in told())
    for change in ("stages", "trimmable"):
        other = admin_pb2.Deployment.FromString(one.SerializeToString())
        if change == "stages":
            other.plan.spec.stages = 1
        else:
            other.plan.profile.trimmable = False
        deployment.print_deployments([plain(other)])
        assert [line.endswith("cannot guess tokens") for line in told()] == [False, True, False, True]


@pytest.mark.parametrize(("folder", "resolved"), [("./here", True), ("here", False), ("none/here", False)])
def test_a_folder_is_named_by_its_whole_path_where_it_is_written_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, resolved: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    whole = str(tmp_path / "here")
    assert deployment.make_spec(folder).model == (whole if resolved else folder)
    assert deployment.make_spec("~/here").model == whole
    assert deployment.make_spec("~/none").model == "~/none"
    assert deployment.make_spec("org/model").model == "org/model"


def test_what_nobody_says_of_a_deployment_is_left_to_the_coordinator() -> None:
    made = deployment.make_spec("Org/Model-1")
    assert made == admin_pb2.DeploymentSpec(
        name="model-1", model="Org/Model-1", strategy="pipeline", replicas=1
    )
    assert deployment.make_spec("m", "").name == ""
    assert list(deployment.make_spec("m", member=["a", "b"]).members) == ["a", "b"]


@pytest.mark.parametrize(("layers", "fine"), [("1", True), ("99999", True), ("100000", False), ("0", False)])
def test_a_split_has_up_to_256_members_of_up_to_99999_layers(layers: str, fine: bool) -> None:
    if fine:
        assert deployment.parse_split(",".join([layers] * 256)) == [int(layers)] * 256
    for text in [] if fine else [layers]:
        with pytest.raises(InvalidInput):
            deployment.parse_split(text)


def test_what_is_done_is_said(deploy: Any, here: Any, planner: Any) -> None:
    done = deploy("--json")
    assert done.data["rings"][0]["ring"] == "m-0"
    assert "serving" not in done.err
    assert "m is on its way" in deploy("--no-wait").err
    for option in ("--split=4", "--member=a"):
        done = deploy(option)
        assert (done.status, "more nodes are online" in done.err) == (0, False), option
    done = here("deployment", "delete", "m")
    assert done.err == "deleted m\n"
    assert [asked.name for asked in planner.calls("DeleteDeployment")] == ["m"]
    plan = admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="m"))
    one = admin_pb2.Deployment(plan=plan, created=7)
    planner.answers["ListDeployments"] = admin_pb2.ListDeploymentsResponse(deployments=[one])
    assert [one["created"] for one in here("deployment", "list", "--json").data] == [7]
    assert here("deployment", "list").out.startswith("name")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-0.6B/", "qwen3-0-6b"),
        ("org/name", "name"),
        ("/models/my model", "my-model"),
        ("/", "model"),
        ("é", "model"),
        ("x" * 300, "x" * 56),
    ],
)
def test_a_model_names_its_deployment(model: str, name: str) -> None:
    assert deployment.default_name(model) == name


def test_a_deployment_on_demand_is_stored_and_not_waited_for(deploy: Any, planner: Any) -> None:
    given = ("--on-demand", "--keep-alive", "2h", "--pin", "--alias", "gpt-4o", "--alias", "qwen3:8b")
    done = deploy(*given, serves=False)
    assert (done.status, done.out.count("m-0")) == (0, 1), done.err
    assert "m is loaded when a client asks for it" in done.err
    spec = planner.calls("CreateDeployment")[-1].spec
    assert (spec.on_demand, spec.keep_alive, spec.pinned) == (True, 7200, True)
    assert list(spec.aliases) == ["gpt-4o", "qwen3:8b"]
    deploy()
    assert not planner.calls("CreateDeployment")[-1].spec.HasField("keep_alive")


def test_the_list_says_which_models_are_loaded_and_what_others_wait_for(here: Any, planner: Any) -> None:
    def known(name: str, *rings: admin_pb2.RingStatus, **load: Any) -> admin_pb2.Deployment:
        spec = admin_pb2.DeploymentSpec(name=name, model="m", on_demand=True)
        status = admin_pb2.LoadStatus(**load)
        return admin_pb2.Deployment(plan=admin_pb2.DeploymentPlan(spec=spec), rings=rings, load=status)

    ring = admin_pb2.RingStatus(ring="b-0", phase=membership_pb2.RING_PHASE_SERVING)
    planner.answers["ListDeployments"] = admin_pb2.ListDeploymentsResponse(
        deployments=[
            known("a", phase=membership_pb2.LOAD_PHASE_NOT_LOADED),
            known("b", ring, phase=membership_pb2.LOAD_PHASE_LOADED, expires=1_800_000_000, waiting=1),
            known("c", phase=membership_pb2.LOAD_PHASE_WAITING, waiting=2, reason="d is unloaded for it"),
            known("d", phase=membership_pb2.LOAD_PHASE_YIELDING, reason="it makes room for c"),
        ]
    )
    lines = {line.split()[0]: line for line in here("deployment", "list").out.splitlines() if line.strip()}
    assert "not loaded" in lines["a"]
    assert "serving" in lines["b"]
    assert "unloaded at 2027-01-15 08:00:00+00:00 if nobody asks" in lines["b"]
    assert "2 waiting: d is unloaded for it" in lines["c"]
    assert "it makes room for c; it is unloaded once its requests are answered" in lines["d"]
