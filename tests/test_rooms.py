"""The layout of docs/where.md: few files beside folders, imports in one direction."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "mesh": set(),
    "api": {"mesh"},
    "edge": {"mesh", "api"},
    "client": {"mesh", "api", "edge"},
    "coordinator": {"mesh"},
    "node": {"mesh"},
    "gateway": {"mesh", "api", "edge"},
    "doctor": {"mesh", "node"},
    "testing": {"mesh", "edge", "client"},
}
"""The packages of sealring that each may import besides itself and the stubs.

`cli` may import all but `testing`."""

PACKAGES = ["mesh", "edge", "coordinator", "node", "gateway", "doctor", "cli"]


@cache
def imports(package: str) -> list[tuple[Path, str]]:
    """Each file below the package, and what of sealring it imports, as `mesh.rpc.tls`."""
    return [
        (file.relative_to(ROOT), f"{node.module}.{alias.name}".removeprefix("sealring."))
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sealring")
        for alias in node.names
    ]


def rooms_of(package: str) -> dict[str, set[str]]:
    """The folders and files in a package, and those of them that each imports."""
    needs: dict[str, set[str]] = {}
    above = tuple(package.split("/"))
    for file, name in imports(package):
        parts, own = name.split("."), file.parts[len(above) :]
        room, (*found, there) = own[0].removesuffix(".py"), parts[: len(above) + 1]
        if tuple(found) == above and there != room:
            needs.setdefault(room, set()).add(there)
    return needs


def module_of(file: Path) -> str:
    """The name by which others import a file, without `sealring.`."""
    return ".".join(file.with_suffix("").parts).removeprefix("sealring.").removesuffix(".__init__")


def modules() -> dict[str, set[str]]:
    """The modules of the product, links of `sealring` followed, and those that each imports."""
    folders = {one.resolve() for one in (ROOT / "sealring").iterdir() if one.is_dir() and one.name != "v1"}
    files = {file.relative_to(ROOT) for one in folders for file in one.rglob("*.py")}
    files |= {file.relative_to(ROOT) for file in (ROOT / "sealring").glob("*.py")}
    known = {module_of(file): set[str]() for file in files}
    for file in files:
        module = module_of(file)
        inside = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = inside[: len(inside) + 1 - node.level] if node.level else []
                start = ".".join([*above, *filter(None, [node.module])])
                names = [f"{start}.{one.name}" for one in node.names]
            else:
                continue
            for name in (one.removeprefix("sealring.") for one in names):
                needed = name if name in known else name.rpartition(".")[0]
                known[module] |= {needed} & known.keys() - {module}
    return known


REGISTERED = ("api.fields", "api.whole")
"""The first runs the second, of which it uses no name, so that the tables of all APIs are registered."""


def test_files_import_each_other_in_one_direction() -> None:
    """A file can be read without reading first a file that needs this one.

    So an import counts wherever it stands: inside a function it only runs later, and under TYPE_CHECKING it
    still names what a reader has to know.
    """
    needs = modules()
    assert {name.partition(".")[0] for name in needs} > {*PACKAGES, "api", "client", "testing"}
    needs[REGISTERED[0]].remove(REGISTERED[1])
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", [*PACKAGES, "node/engine"])
def test_folders_import_each_other_in_one_direction(package: str) -> None:
    TopologicalSorter(rooms_of(package)).prepare()  # raises CycleError, which names the circle


ENGINE = ("caches", "staging", "drafts", "text", "vision", "seats")
"""Folders of the engine, each of which imports only those before it."""


def test_rooms_of_the_engine_import_those_below_alone() -> None:
    """Whether themselves or by files that stand beside them."""
    needs = rooms_of("node/engine")
    for place, room in enumerate(ENGINE):
        there, new = set[str](), {room}
        while new:
            there |= new
            new = set[str]().union(*(needs.get(one, set()) for one in new)) - there
        assert not there & set(ENGINE[place + 1 :])


@pytest.mark.parametrize(
    "package", [one for one in PACKAGES if one != "doctor"]
)  # which is one folder of checks
def test_few_files_stand_beside_the_folders(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= 6


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_those_that_they_may(package: str) -> None:
    folder = f"sealring/{package}" if package in ("api", "client", "testing") else package
    found = {name.partition(".")[0] for _, name in imports(folder)}
    assert found <= MAY_IMPORT[package] | {package, "v1", "openai"}


def test_caches_know_nothing_of_the_engine_that_uses_them() -> None:
    """Nor of the stages: what is known of a class of caches is in one place."""
    own = "node.engine.caches"
    found = {name for _, name in imports("node/engine/caches") if name.startswith("node.")}
    assert not {name for name in found if not name.startswith((f"{own}.", "node.engine.mlx_lm_import"))}
    assert not [
        file
        for file in (ROOT / own.replace(".", "/")).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level > 1
    ]


def test_the_coordinators_parts_get_what_they_need_when_they_are_made() -> None:
    """A callback that is set on another part later is an arrow that its constructor does not show."""
    tree = ast.parse((ROOT / "coordinator/main.py").read_text("utf-8"))
    (build,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "_build")
    targets = [target for one in ast.walk(build) if isinstance(one, ast.Assign) for target in one.targets]
    assert [ast.unparse(one) for one in targets if isinstance(one, ast.Attribute)]
    assert not [
        ast.unparse(one)
        for one in targets
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) != "self"
    ]


def test_the_command_line_imports_no_doubles() -> None:
    assert not [file for file, name in imports("cli") if name.startswith("testing")]


FACES = [
    "gateway.scheduler",
    "mesh.crypto",
    "mesh.member",
    "mesh.pki",
    "mesh.ring",
    "mesh.roster",
    "mesh.rpc",
    "node.engine",
    "node.engine.drafts",
    "node.engine.text",
]
"""Packages whose public names tests import from the package, so that a class can move inside it."""

DEEPER = {
    "gateway.scheduler.recalls",
    "mesh.member.discovery",
    "mesh.member.proof",
    "mesh.ring.prefix_marks",
    "mesh.roster.codec",
    "mesh.rpc.protocol",
    "mesh.rpc.reach",
    "mesh.rpc.server",
    "mesh.rpc.silence",
    "mesh.rpc.transport",
    "node.engine.epoch",
    "node.engine.helper",
    "node.engine.main",
    "node.engine.params",
    "node.engine.warm_up",
}
"""Modules inside these that tests of other places import, for what is not public. The list only shrinks."""


def deep_imports() -> list[tuple[Path, str, str, str]]:
    """What tests import from a module inside a package of `FACES`: the file, package, module and name."""
    found = []
    for file, name in imports("tests"):
        for face in FACES:
            module, _, what = name.removeprefix(f"{face}.").partition(".")
            if name.startswith(f"{face}.") and (ROOT / face.replace(".", "/") / f"{module}.py").exists():
                found.append((file, face, module, what))
    return found


def test_public_names_are_imported_from_their_package() -> None:
    public = {face: import_module(f"sealring.{face}").__all__ for face in FACES}
    assert not [
        f"{file}: {what} is public in sealring.{face}"
        for file, face, module, what in deep_imports()
        if what in public[face]
    ]


@pytest.mark.parametrize("face", FACES)
def test_a_public_name_is_found_and_is_no_module(face: str) -> None:
    package = import_module(f"sealring.{face}")
    for name in package.__all__:
        assert not isinstance(getattr(package, name), ModuleType), f"{name} is also a module"


def test_the_product_imports_from_modules() -> None:
    """mypy checks the product, and what a package gives has no type."""
    public = {f"{face}.{name}" for face in FACES for name in import_module(f"sealring.{face}").__all__}
    for room in (*PACKAGES, "sealring/api", "sealring/client", "sealring/testing"):
        assert not [f"{file}: {name}" for file, name in imports(room) if name in public]


def test_only_the_tests_of_a_place_look_inside_it() -> None:
    deeper = {
        f"{face}.{module}"
        for file, face, module, _ in deep_imports()
        if not file.is_relative_to(Path("tests", *face.split(".")))
    }
    assert deeper == DEEPER, "import from the package; a module that has left the list does not come back"


LINES = {
    "mesh": 14_300,
    "sealring/api": 5_000,
    "sealring/client": 2_600,
    "sealring/testing": 700,
    "edge": 4_300,
    "coordinator": 13_200,
    "gateway": 1_400,
    "gateway/rings": 3_500,
    "gateway/scheduler": 4_400,
    "node": 15_500,
    "node/engine": 21_300,
    "node/engine/text": 6_600,
    "node/engine/vision": 1_600,
    "doctor": 2_600,
    "cli": 13_800,
}
SPARE = 150
"""Lines by which a budget may exceed its room: what is removed lowers it. Budgets are whole hundreds, so that
changes made side by side seldom write different ones."""


@pytest.mark.parametrize("room", LINES)
def test_a_room_has_no_more_lines_than_its_budget(room: str) -> None:
    """A budget rises only in a commit that adds what users gain, and says so there. Anything else that needs
    lines pays by removing some. Comments and docstrings count: they are read as well."""
    inner = [one for one in LINES if one.startswith(f"{room}/")]
    files = [file for file in (ROOT / room).rglob("*.py") if "v1" not in file.relative_to(ROOT).parts]
    own = [file for file in files if not any(file.is_relative_to(ROOT / one) for one in inner)]
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in own)
    assert LINES[room] % 100 == 0
    assert LINES[room] - SPARE <= lines <= LINES[room]
