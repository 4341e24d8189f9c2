"""The admin commands against a real coordinator with one node, which serves nothing yet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from patience import PATIENCE_SECONDS

from sealring.cli.local.cluster import LocalCluster

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
]
MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
Run = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path_factory.mktemp("admin") / "state", MODEL, nodes=1) as cluster:
        await cluster.start()
        yield cluster


@pytest.fixture
def run(cluster: LocalCluster, sealring: Any, here: Any) -> Run:
    """Runs a command with the operator's bundle, away from the event loop; daemons as processes."""

    async def call(*arguments: str, **options: Any) -> Any:
        bundle = {"SEALRING_CLI_OPERATOR": str(cluster.operator_bundle)}
        runner = sealring if "run" in arguments else here
        return await asyncio.to_thread(runner, *arguments, **(bundle | options))

    return call


@pytest.fixture
def join(run: Run, tmp_path: Path) -> Run:
    async def call(role: str, token: str, name: str, *more: str, stdin: str = "") -> Any:
        where = ["--state-dir", str(tmp_path / name), "--name", name]
        return await run(role, "join", token, *where, *more, stdin=stdin)

    return call


async def test_status_and_nodes(run: Run, cluster: LocalCluster) -> None:
    shown = (await run("status", "--json")).data
    assert shown["deployments"] == []
    node = shown["nodes"][0]
    assert (node["name"], node["state"], node["level"], node["trust"]) == (
        "node-0",
        "online",
        "software",
        "software",
    )
    assert (await run("node", "list", "--json")).data[0]["id"] == node["id"]
    assert "node-0" in (await run("status")).out
    assert set(cluster.processes) == {"coordinator", "node-0", "gateway"}


async def test_the_roster_is_verified(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    shown = (await run("roster", "show", "--json")).data
    assert [len(shown[name]) for name in ("members", "gateways", "rings")] == [1, 1, 0]
    bundle = tmp_path / "bundle"
    bundle.mkdir(mode=0o700)
    for file in cluster.operator_bundle.iterdir():
        (bundle / file.name).write_bytes(file.read_bytes())
        (bundle / file.name).chmod(0o600)
    member = json.loads((bundle / "member.json").read_text())
    member["root_sha256"] = "00" * 32
    (bundle / "member.json").write_text(json.dumps(member, sort_keys=True, separators=(",", ":")))
    refused = await run("roster", "show", "--operator", str(bundle))
    assert refused.status == 6
    assert "ROOT_PIN" in refused.err


async def test_tokens_are_listed_revoked_and_spent_once(run: Run, join: Run) -> None:
    token = (await run("token", "create", "--note", "mine", "--ttl", "60s")).out.split()[-1]
    listed = (await run("token", "list", "--json")).data
    entry = next(one for one in listed if one["note"] == "mine")
    assert (entry["role"], entry["uses"]) == ("node", 1)
    assert token not in json.dumps(listed)
    assert (await run("token", "revoke", entry["token_id"])).status == 0
    assert (await run("token", "revoke", entry["token_id"])).status == 3
    assert (await join("node", token, "late", "--software-identity-allowed")).status == 6

    made = (await run("token", "create", "--json")).data
    line = f"sealring node join {made['token']}"
    joined = await join("node", "-", "nine", "--software-identity-allowed", "--json", stdin=line)
    assert joined.status == 0, joined.err
    following = joined.err.splitlines()[-1]
    assert following.startswith("next: sealring node run --state-dir ")
    assert "--name" not in following, "run does not read it"
    assert following.endswith(" --software-identity-allowed")
    again = await join("node", made["token"], "ten", "--software-identity-allowed")
    assert again.status == 6
    assert "JOIN_REFUSED" in again.err
    assert (await run("node", "drain", "nine")).status == 0
    assert (await run("node", "drain", "--undo", "nine")).status == 0
    assert (await run("node", "evict", "nine")).status == 0
    assert f"evicted nine {joined.data['member_id']}" in (await run("node", "list")).out
    assert (await run("node", "evict", "nine")).status == 3
    assert (await run("node", "ban", "nine")).status == 0, "also who was evicted"
    assert f"banned nine {joined.data['member_id']}" in (await run("node", "list")).out


async def test_who_was_evicted_joins_again_with_a_new_token_or_leaves(
    run: Run, join: Run, tmp_path: Path
) -> None:
    async def attempt() -> Any:
        token = (await run("token", "create", "--role", "gateway")).out.split()[-1]
        return await join("gateway", token, "back", "--json")

    first = await attempt()
    assert first.status == 0, first.err
    assert (await run("gateway", "evict", "back")).status == 0
    again = await attempt()
    assert again.status == 0, again.err
    assert again.data["member_id"] == first.data["member_id"]
    where = ["--state-dir", str(tmp_path / "back")]
    left = await run("gateway", "leave", *where)
    assert left.status == 0, left.err
    assert "sealring gateway evict" in left.err
    assert (await run("gateway", "leave", *where)).status != 0
    assert (await run("gateway", "ban", "back")).status == 0
    banned = await attempt()
    assert "this identity is banned" in banned.err


async def test_gateways_are_listed_evicted_and_banned_by_name(run: Run, join: Run) -> None:
    token = (await run("token", "create", "--role", "gateway")).out.split()[-1]
    joined = await join("gateway", token, "edge", "--json")
    assert joined.status == 0, joined.err

    async def listed() -> dict[str, bool]:
        return {one["name"]: one["watching"] for one in (await run("gateway", "list", "--json")).data}

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await listed())["gateway"]:  # the cluster's own, which is up when the nodes are, or later
            await asyncio.sleep(0.1)
    assert not (await listed())["edge"]
    assert "edge" in (await run("gateway", "list")).out
    assert (await run("node", "evict", "edge")).status == 3, "it is no node"
    assert (await run("gateway", "evict", "edge")).status == 0
    assert "edge" not in await listed()
    assert (await run("gateway", "ban", joined.data["member_id"])).status == 0
    assert f"banned edge {joined.data['member_id']}" in (await run("gateway", "list")).out


async def test_models_are_listed_and_fetched_only_where_the_owner_allows_it(run: Run) -> None:
    (node,) = (await run("model", "list", "--json")).data
    refused = await run("model", "pull", "org/model", "--node", node["node"])
    assert refused.status != 0
    assert "allow_downloads" in refused.err
    nothing = await run("model", "remove", "org/model")
    assert "no node has fetched org/model" in nothing.err
    unknown = await run("deploy", "org/model")
    assert "no node can serve the model" in unknown.err


async def test_the_audit_log_is_shown_and_verified(run: Run) -> None:
    actions = [one["action"] for one in (await run("audit", "list", "--json")).data]
    assert {"create_cluster", "create_join_token", "enrol"} <= set(actions)
    assert "enrol" in (await run("audit", "list", "--limit", "1000")).out
    numbers = [one["sequence"] for one in (await run("audit", "list", "--limit", "2", "--json")).data]
    assert numbers == [len(actions) - 1, len(actions)], "the newest, oldest first"
    assert [
        one["sequence"] for one in (await run("audit", "list", "--after", "0", "--limit", "2", "--json")).data
    ] == [1, 2]
    verified = (await run("audit", "verify", "--json")).data
    assert verified["entries"] >= len(actions)
    assert verified["head"] in (await run("audit", "verify")).out


async def test_a_token_is_for_one_role_and_one_cluster(run: Run, join: Run) -> None:
    token = (await run("token", "create", "--role", "gateway")).out.split()[-1]
    assert (await join("node", token, "wrong", "--software-identity-allowed")).status == 6
    version, root, *rest = token.split(".")
    other = ".".join([version, "a" * len(root), *rest])
    refused = await join("gateway", other, "stray")
    assert refused.status in (2, 6)
    for garbage in ("", "sr1.x", "x" * 600):
        assert (await join("gateway", garbage, "stray")).status == 2


async def test_without_leave_a_key_in_a_file_is_refused(run: Run, join: Run) -> None:
    token = (await run("token", "create")).out.split()[-1]
    refused = await join("node", token, "soft")
    assert refused.status == 6
    assert "software_identity_allowed" in refused.err


async def test_plans_are_shown_or_refused_with_reasons(run: Run) -> None:
    shown = (await run("deployment", "plan", str(MODEL), "--name", "x", "--json")).data
    assert shown["rings"][0]["stages"][0]["end_layer"] == 9
    assert shown["profile"]["layers"] == 9
    assert "node-0" in (await run("deployment", "plan", str(MODEL), "--member", "node-0", "--split", "9")).out
    for arguments, status in (
        (["/nowhere/model"], 3),
        ([str(MODEL), "--stages", "5"], 7),
        ([str(MODEL), "--context", "9999999"], 2),
        ([str(MODEL), "--split", "4,4"], 2),
        ([str(MODEL), "--trust-floor", "hardware"], 7),
        ([str(MODEL), "--member", "nobody"], 3),
        ([str(MODEL), "--name", "no good"], 2),
    ):
        refused = await run("deployment", "plan", *arguments)
        assert refused.status == status, (arguments, refused.err)
        assert refused.out == ""
        assert refused.err.splitlines()[-1].startswith("error: ")
        assert "FAULT" not in refused.err
    assert (await run("deployment", "list", "--json")).data == []
    assert (await run("deployment", "delete", "nothing")).status == 3


async def test_a_state_folder_has_one_process(run: Run, cluster: LocalCluster) -> None:
    for name, component in (("coordinator", "coordinator"), ("node-0", "node")):
        config = str(cluster.state_dir / "config" / f"{name}.toml")
        refused = await run("--config", config, component, "run")
        assert refused.status in (7, 8), (name, refused.err)
        assert "STATE_IN_USE" in refused.err
        assert len(refused.err.splitlines()) == 1


async def test_a_port_in_use_is_named(run: Run, cluster: LocalCluster, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "other")]
    assert (await run("coordinator", "init", *state)).status == 0
    again = await run("coordinator", "init", *state)
    assert again.status == 4
    refused = await run("coordinator", "run", *state, "--listen", cluster.grpc_address)
    assert refused.status == 7
    assert refused.err.count("\n") == 1
    assert cluster.grpc_address in refused.err


async def test_operators_are_added_rotated_and_revoked(run: Run, tmp_path: Path) -> None:
    folder, newer = tmp_path / "reader", tmp_path / "newer"
    added = await run("operator", "add", "reader", "--role", "read", "--out", str(folder))
    assert added.status == 0, added.err
    assert {(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {0o600}
    as_reader = ("--operator", str(folder))
    assert (await run("node", "list", *as_reader)).status == 0
    assert (await run("roster", "show", *as_reader)).status == 0
    assert (await run("audit", "verify", *as_reader)).status == 0
    more = await run("operator", "add", "x", "--role", "read", "--out", str(tmp_path / "a" / "b"), *as_reader)
    assert (more.status, (tmp_path / "a").exists()) == (6, False)
    refused = await run("token", "create", *as_reader)
    assert (refused.status, "OPERATOR_ROLE" in refused.err) == (6, True)
    listed = {one["name"]: one["role"] for one in (await run("operator", "list", "--json")).data}
    assert listed == {"operator": "admin", "reader": "read"}

    taken = await run("operator", "rotate", "reader", "--out", str(folder))
    assert "BUNDLE_EXISTS" in taken.err
    assert (await run("node", "list", *as_reader)).status == 0, "nothing was asked for"
    assert (await run("operator", "rotate", "reader", "--out", str(newer), "--lifetime", "1d")).status == 0
    assert "OPERATOR_REVOKED" in (await run("node", "list", *as_reader)).err
    assert (await run("node", "list", "--operator", str(newer))).status == 0
    assert (await run("operator", "revoke", "reader")).status == 0
    assert "OPERATOR_REVOKED" in (await run("node", "list", "--operator", str(newer))).err
    assert (await run("operator", "revoke", "reader")).status == 3
    assert "reader" not in (await run("operator", "list")).out
