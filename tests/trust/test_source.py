"""What must not be in the source at all: switches that turn trust off, and ways of reading that run code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sealring.cli.settings import CliSettings
from sealring.coordinator.settings import CoordinatorSettings
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.crypto import Label
from sealring.mesh.system.addresses import is_loopback, parse_address
from sealring.node.settings import NodeSettings

ROOT = Path(__file__).parents[2]
PACKAGES = ("mesh", "edge", "coordinator", "node", "gateway", "doctor", "cli", "sealring")
SETTINGS: tuple[type[BaseModel], ...] = (CliSettings, CoordinatorSettings, GatewaySettings, NodeSettings)
REVIEWED_SWITCHES = {
    *("software_identity_allowed", "allow_downloads", "hybrid_sealing_key", "hidden", "measure_links")
}
"""Switches that settings may have: identities that are only claimed, fetching of models, a stronger key, a
cluster that does not announce itself, rings over the fastest of a machine's addresses."""

HARMLESS_SWITCHES = {"compute_on_cpu", "idle_prefill"}
"""Switches that may be on from the beginning, because trust in nobody rests on them."""

REVIEWED_READERS = {
    "mesh/settings/config.py",
    "mesh/system/paths.py",
    "node/carrier/ring.py",  # sets what MLX reads
    "node/engine/apart.py",  # likewise
    "node/engine/group.py",  # likewise
    "node/engine/metal.py",  # likewise
    "node/engine/nvidia.py",  # likewise
    "node/engine/staging/shards.py",  # likewise
    "node/engine/text/template.py",  # sets what the C library reads
    "node/main.py",  # likewise
    "node/scratch.py",  # likewise
    "node/models/folders.py",  # where the Hugging Face library keeps models
    "node/daemon/supervisor.py",  # what children inherit
}
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "jsonpickle"}


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [
        (file.relative_to(ROOT), ast.parse(file.read_text("utf-8")))
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]


@cache
def nodes() -> dict[type[ast.AST], list[tuple[Path, Any]]]:
    """Every node of the source by its kind, with its file."""
    found: defaultdict[type[ast.AST], list[tuple[Path, Any]]] = defaultdict(list)
    for file, tree in trees():
        for node in ast.walk(tree):
            found[type(node)].append((file, node))
    return found


@cache
def imported() -> list[tuple[str, str]]:
    """What each file imports."""
    plain = [(str(file), alias.name) for file, node in nodes()[ast.Import] for alias in node.names]
    absolute = [(file, node) for file, node in nodes()[ast.ImportFrom] if not node.level]
    return plain + [(str(file), node.module or "") for file, node in absolute]


def test_imports_name_installed_packages() -> None:
    """In a checkout `import mesh` works as well, and makes everything in it a second time."""
    folders = set(PACKAGES) - {"sealring"}
    assert [one for one in imported() if one[1].partition(".")[0] in folders] == []


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


def test_log_events_are_names_and_what_differs_is_in_fields() -> None:
    """So that they can be searched for and counted, and so that no content gets into one."""
    found = []
    for file, node in nodes()[ast.Call]:
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS and node.args):
            continue
        if ast.unparse(node.func.value).rpartition(".")[2] in {"log", "_log", "known"}:
            event = node.args[0]
            parts = [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]
            names = [getattr(part, "value", None) for part in parts]
            good = [isinstance(one, str) and re.fullmatch("[a-z][a-z0-9_]+", one) for one in names]
            found += [] if all(good) else [f"{file}:{node.lineno}"]
    assert found == []


def test_no_setting_turns_trust_off() -> None:
    switches = {
        name
        for model in SETTINGS
        for name, field in model.model_fields.items()
        if field.annotation in (bool, bool | None)
    }
    assert switches <= REVIEWED_SWITCHES | HARMLESS_SWITCHES
    assert not any(getattr(model(), name, False) for model in SETTINGS for name in REVIEWED_SWITCHES)


def test_everything_listens_on_loopback_unless_told_otherwise() -> None:
    for model in SETTINGS:
        settings: Any = model()
        for name in model.model_fields:
            if name == "listen" or name.endswith("_listen"):
                address = getattr(settings, name)  # None: it does not listen there
                assert address is None or is_loopback(parse_address(address)[0]), (model, name)


def test_nothing_that_is_read_can_run_code() -> None:
    """Requests shared by pickle over the ring were a way to run code on every member."""
    assert [one for one in imported() if one[1].split(".")[0] in RUNS_CODE] == []
    called = [(str(file), getattr(node.func, "id", "")) for file, node in nodes()[ast.Call]]
    assert [one for one in called if one[1] in ("eval", "exec")] == []


def test_tls_is_left_unverified_only_where_the_root_is_checked_instead() -> None:
    places = {str(file) for file, node in nodes()[ast.Attribute] if node.attr == "CERT_NONE"}
    assert places == {"mesh/member/bootstrap.py"}


def test_every_signature_is_made_under_a_label_of_its_own() -> None:
    values = [label.value for label in Label]
    assert len(set(values)) == len(values)
    assert not any(one != other and other.startswith(one) for one in values for other in values)


def test_nothing_reads_a_switch_from_the_environment() -> None:
    """Settings come through `mesh/settings/config.py`, which knows every name; nobody looks for others beside
    it."""
    environment = [
        file for file, node in nodes()[ast.Attribute] if node.attr in ("environ", "getenv", "environb")
    ]
    readers = {
        str(file) for file in environment if file.parts[0] in ("mesh", "coordinator", "node", "gateway")
    }
    assert readers <= REVIEWED_READERS


def test_every_python_is_started_without_the_working_folder() -> None:
    """`python -m` runs a `sealring.py` of the working folder first; `-P` keeps that folder out."""
    sources = [(ROOT / file).read_text("utf-8") for file, _ in trees()]
    starts = [found for source in sources for found in re.findall(r'sys\.executable,\s*(".*?")', source)]
    assert len(starts) >= 2
    assert set(starts) == {'"-P"'}
    named = sum(len(re.findall(r"(?<!execv\()sys\.executable,", source)) for source in sources)
    assert named == len(starts)


def test_the_table_names_tests_that_exist() -> None:
    """Every file and every test of README.md is there."""
    table = (ROOT / "tests/trust/README.md").read_text("utf-8")
    words = set(re.findall(r"`([A-Za-z0-9_/]+(?:\.py)?)`", table))
    files = {word for word in words if word.endswith(".py") and "/" in word and not word.startswith("bench")}
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).exists()] == []
    source = "".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    tests = {word for word in words if word.startswith("test_") and not word.endswith(".py")}
    assert [name for name in sorted(tests) if f"def {name}" not in source] == []


def test_every_process_forbids_core_files_first() -> None:
    processes = {
        str(file): next(
            (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "main"), None
        )
        for file, tree in trees()
        if "__name__ == '__main__'" in _conditions(tree)
    }
    assert {"cli/__main__.py", "node/engine/main.py", "node/carrier/main.py"} <= set(processes)
    del processes["cli/service/launchd.py"]  # writes examples for the repository
    for file, main in processes.items():
        assert main is not None, file
        first = main.body[1 if ast.get_docstring(main) else 0]
        assert ast.unparse(first) == "forbid_core_files()", file
    assert 'sealring = "sealring.cli.__main__:main"' in (ROOT / "pyproject.toml").read_text()


def _conditions(tree: ast.Module) -> list[str]:
    return [ast.unparse(one.test) for one in tree.body if isinstance(one, ast.If)]


def test_what_a_peer_sent_is_cut_before_it_is_copied() -> None:
    """`list(message.many)[:8]` makes an object of each of the millions that may be there: a node's hello held
    up the coordinator for four seconds."""
    found = [
        f"{file}:{node.lineno}"
        for file, node in nodes()[ast.Subscript]
        if isinstance(node.slice, ast.Slice)
        and node.slice.upper is not None
        and re.fullmatch(r"(list|tuple)\([\w.]+\)", ast.unparse(node.value))
    ]
    assert not found
