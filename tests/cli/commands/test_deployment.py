"""`sealring deployment` and `sealring deploy`: names and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import deployment
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.links import Network
from sealring.coordinator.planning.planner import memory_of, plan
from sealring.mesh.errors import InvalidInput, NotFound
from sealring.v1 import admin_pb2
from tests.coordinator.conftest import small_profile

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(("layers", "fine"), [("1", True), ("99999", True), ("100000", False), ("0", False)])
def test_a_split_has_up_to_256_members_of_up_to_99999_layers(layers: str, fine: bool) -> None:
    if fine:
        assert deployment.parse_split(",".join([layers] * 256)) == [int(layers)] * 256
    for text in [] if fine else [layers]:
        with pytest.raises(InvalidInput):
            deployment.parse_split(text)


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


def test_a_file_to_simulate_is_not_read_without_end(here: Any, home: Path) -> None:
    (home / "purchase.json").write_text(" " * (1 << 20) + "{}")
    assert "FILE_TOO_LARGE" in here("deployment", "plan", "--simulate", "purchase.json").err


@pytest.mark.parametrize("own", ["", "m-0"])
@pytest.mark.parametrize("beside", [[], [300 * MIB], [100 * MIB, 200 * MIB]])
def test_what_a_plan_leaves_is_one_figure(
    own: str, beside: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reasons and the table of the nodes' memory say the same, also of a deployment that serves now."""
    overhead = 10 * MIB
    taken = sum(one + overhead for one in beside)
    spec = admin_pb2.DeploymentSpec(name="m", model="m", context=256, trust_floor=10, replicas=1)
    members = [Candidate("a", "mac-1", GIB, 10, taken=taken, shares=tuple(map(str, beside)))]
    made = plan(spec, small_profile(), members, Network())
    rings = [{"ring": f"other-{at}", "memory": one} for at, one in enumerate(beside)]
    rings += [{"ring": own, "memory": memory_of(made.rings[0].stages[0])}] if own else []
    beat = {"memory_usable": GIB, "memory_overhead": overhead, "memory_used": 0}
    deployment.print_change(
        made, [{"id": "a", "name": "mac-1", "state": "online", "heartbeat": beat, "rings": rings}]
    )
    (told,) = (one for one in made.reasons if "which leaves" in one)
    left = told.partition("which leaves ")[2].partition(" of mac-1")[0]
    assert left in capsys.readouterr().out.splitlines()[-1]


def test_a_name_that_fits_shows_leads_to_its_id(here: Any, host: Any, coordinator: Any) -> None:
    for name, led in (("qwen3-0.6b", True), ("none", False)):
        coordinator.answers["CreateDeployment"] = NotFound("no node has it", reason="UNKNOWN_MODEL")
        assert ("it is fetched: sealring deploy Qwen/Qwen3-0.6B" in here("deploy", name).err) == led
