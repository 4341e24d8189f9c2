"""Mutation run over the security code of `mesh`: would a test fail if this check were not there? Prints JSON.

Each mutant changes one thing in one file of a private copy of the tree: a comparison flipped, a condition
negated or cut in half, a raise, a call or the body of an if dropped, a constant changed. The tests that are
mapped to the file run with `-x`; a mutant that they do not notice survives. Messages, docstrings, annotations
and decorators are left alone. Survivors that behave as the original does stand in `mutate_equivalent.json`
with the reason; they are reported and do not count.

Usage: python bench/mutate.py [--files sigma,dsse] [--sample 40] [--seed 1] [--out result.json]
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("mutate_equivalent.json")
KNOWN = "trust/test_known_answers.py"
TESTS: dict[str, tuple[str, ...]] = {
    "sigma": ("mesh/test_sigma.py", KNOWN, "mesh/test_session.py"),
    "session": ("mesh/test_session.py", KNOWN, "mesh/test_records.py", "mesh/test_sigma.py"),
    "records": ("mesh/test_records.py", KNOWN),
    "roster_reader": ("mesh/test_roster_reader.py", KNOWN, "mesh/test_roster_codec.py"),
    "roster_codec": ("mesh/test_roster_codec.py", KNOWN, "mesh/test_roster_reader.py"),
    "roster_rules": ("mesh/test_roster_codec.py", "mesh/test_roster_reader.py"),
    "roster_state": ("mesh/test_roster_reader.py",),
    "dsse": ("mesh/test_dsse.py", KNOWN, "mesh/test_rootmeta.py"),
    "rootmeta": ("mesh/test_rootmeta.py", KNOWN, "mesh/test_roster_reader.py"),
    "envelope": ("mesh/test_envelope.py", KNOWN),
    "identity": ("mesh/test_identity.py", KNOWN),
    "suites": ("mesh/test_suites.py", KNOWN, "mesh/test_sigma.py"),
    "trust": ("mesh/test_trust.py", "mesh/test_roster_codec.py"),
    "bootstrap": ("mesh/test_bootstrap.py",),
    "encoding": ("mesh/test_encoding.py", "mesh/test_dsse.py"),
    "attestation": ("mesh/test_attestation.py",),
    "certificates": ("mesh/test_certificates.py",),
    "device": ("mesh/test_device.py",),
    "tls": ("mesh/test_tls.py",),
    "statefiles": ("mesh/test_statefiles.py",),
}
SHARED = (
    "mesh",
    "tests/conftest.py",
    "tests/mesh",
    "tests/trust",
    "tests/support",
    "sealring",
    "pyproject.toml",
)
PRELOAD = ("pytest", "hypothesis", "cryptography.x509", "nacl.signing", "structlog", "grpc.aio", "pydantic")
"""Imported once, before the children that run the tests are forked: nothing of ours."""

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where, what it was, what it is, and the whole file with it."""

    scope: str
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """Stands for the same mutant while lines move."""
        return f"{self.scope}: {self.before} -> {self.after}"


@dataclass
class Result:
    """What became of one file's mutants."""

    killed: int = 0
    total: int = 0
    possible: int = 0
    equivalent: list[dict[str, str]] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a file, in order."""
    tree = ast.parse(source)
    found = []
    for scope, node, variants in _places(tree, ""):
        for before, after, undo in variants:
            found.append(Mutant(scope, getattr(node, "lineno", 0), before, after, ast.unparse(tree)))
            undo()
    return found


Variant = tuple[str, str, Callable[[], None]]


def _places(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST, Iterator[Variant]]]:
    """Depth first, without annotations, decorators, docstrings and what is raised."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _documents(child):
                continue
            put = _putter(node, name, index if isinstance(value, list) else None)
            yield scope, child, _variants(child, put)
            if isinstance(child, ast.Raise) or _logs(child):
                continue
            yield from _places(child, _scope(child, scope))


def _scope(node: ast.AST, outer: str) -> str:
    """Where the inside of `node` is: in a function, a class, or the value of a constant of the module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{outer}.{node.name}".lstrip(".")
    if not outer and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return outer


def _documents(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("_log.", "log."))


def _putter(parent: ast.AST, name: str, index: int | None) -> Callable[[ast.AST], None]:
    def put(node: ast.AST) -> None:
        if index is None:
            setattr(parent, name, node)
        else:
            getattr(parent, name)[index] = node

    return put


def _variants(node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[Variant]:
    for other in _changed(node):
        ast.fix_missing_locations(ast.copy_location(other, node))
        put(other)
        yield _short(node), _short(other), lambda: put(node)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[index] = _FLIPPED[type(operator)]()
            yield other
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values)):
            rest = [value for number, value in enumerate(node.values) if number != index]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
        other = copy.deepcopy(node)
        other.test = ast.UnaryOp(ast.Not(), node.test)
        yield other
        if isinstance(node, ast.If) and not isinstance(node.body[0], ast.Raise):
            other = copy.deepcopy(node)
            other.body = [ast.Pass()]
            yield other
    elif isinstance(node, ast.Raise) or _is_call(node):
        yield ast.Pass()
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _logs(node)


def _other_constants(value: object) -> Iterator[ast.Constant]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, bytes):
        yield ast.Constant(value + b"X")


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 140 else text[:137] + "..."


def copy_tree(folder: Path) -> None:
    """A private copy of what the tests need: nothing here changes the tree that people work in."""
    for name in SHARED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)


def run_tests(folder: Path, tests: list[str], seconds: float) -> tuple[bool, float]:
    """Whether the tests pass, and how long they took: in a forked child, which ends with its time."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(folder, tests)
    status = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = code
        elif time.monotonic() - started > seconds:
            os.killpg(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        else:
            time.sleep(0.01)
    return os.waitstatus_to_exitcode(status) == 0, time.monotonic() - started


def _be_child(folder: Path, tests: list[str]) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        import pytest

        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            "-Wignore:Module already imported",
            "--no-header",
            "--tb=no",
        ]
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


def mutate_file(folder: Path, name: str, sample: int, seed: int) -> Result:
    """Runs the sampled mutants of one file."""
    target = folder / "mesh" / f"{name}.py"
    source = target.read_text()
    tests = [f"tests/{test}" for test in TESTS[name] if (folder / "tests" / test).exists()]
    passed, seconds = run_tests(folder, tests, 600)
    if not passed:
        raise SystemExit(f"the tests of {name} fail without any change: {' '.join(tests)}")
    every = mutants(source)
    chosen = random.Random(f"{seed} {name}").sample(every, min(sample, len(every)))
    known = json.loads(EQUIVALENT.read_text()).get(name, {}) if EQUIVALENT.exists() else {}
    result = Result(possible=len(every))
    for mutant in sorted(chosen, key=lambda one: one.line):
        if mutant.name in known:
            result.equivalent.append({"mutant": mutant.name, "reason": known[mutant.name]})
            continue
        result.total += 1
        target.write_text(mutant.source)
        if run_tests(folder, tests, 10 + 4 * seconds)[0]:
            result.survivors.append(f"{mutant.line} {mutant.name}")
            print(f"survived: {name}.py:{mutant.line} {mutant.name}", file=sys.stderr, flush=True)
        else:
            result.killed += 1
    target.write_text(source)
    print(f"{name}: {result.killed} of {result.total} killed", file=sys.stderr, flush=True)
    return result


def _interpreter_uses(folder: Path) -> None:
    """Raises unless tests in the copy import the copy."""
    command = [sys.executable, "-c", "import mesh; print(mesh.__file__)"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout
    if not Path(found.strip()).is_relative_to(folder):
        raise SystemExit("the copy is not what its tests would import")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", default=",".join(TESTS), help="names of mesh modules, comma-separated")
    parser.add_argument("--sample", type=int, default=40, help="mutants per file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    arguments = parser.parse_args()
    for module in PRELOAD:
        importlib.import_module(module)
    files = arguments.files.split(",")
    with tempfile.TemporaryDirectory(prefix="sealring-mutate-") as temporary:
        folder = Path(temporary).resolve()
        copy_tree(folder)
        _interpreter_uses(folder)
        results = {name: mutate_file(folder, name, arguments.sample, arguments.seed) for name in files}
    killed, total = (sum(getattr(one, what) for one in results.values()) for what in ("killed", "total"))
    report = {
        "seed": arguments.seed,
        "sample": arguments.sample,
        "killed": killed,
        "total": total,
        "ratio": round(killed / max(total, 1), 4),
        "files": {name: asdict(result) for name, result in results.items()},
    }
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
