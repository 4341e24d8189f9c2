"""What a mutant is: one file with one thing changed.

A comparison flipped, a condition negated or cut in half, a raise, a call or the body of an if dropped, a
constant changed. Messages, docstrings, annotations, decorators and logging are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SHOWN = 140


@dataclass(frozen=True)
class Mutant:
    """One change. `name` is unique in its file and stands for the same mutant while lines move.

    `lines` are those by which the tests that reach it are found: the line of the change and that of its
    statement. What runs as the file is imported has none, unless it is a constant that functions of this file
    alone use: then theirs.
    """

    name: str
    line: int
    lines: frozenset[int]
    index: int


@dataclass(frozen=True)
class _Place:
    scope: str
    node: ast.AST
    statement: int
    runs: bool
    put: Callable[[ast.AST], None]


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a file, in order."""
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    tree = ast.parse(source)
    uses = _uses(tree)
    for index, (place, other) in enumerate(_changes(tree)):
        line = getattr(place.node, "lineno", place.statement)
        name = f"{place.scope}: {_short(place.node)} -> {_short(other)}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" (#{seen[name]})"
        lines = frozenset({line, place.statement}) if place.runs else uses.get(place.scope, frozenset())
        found.append(Mutant(name, line, lines, index))
    return found


def mutated(source: str, mutant: Mutant) -> str:
    """The whole file with the one change in it."""
    tree = ast.parse(source)
    for index, (place, other) in enumerate(_changes(tree)):
        if index == mutant.index:
            place.put(ast.fix_missing_locations(ast.copy_location(other, place.node)))
            return ast.unparse(tree)
    raise ValueError(f"there is no mutant {mutant.name}")


def _changes(tree: ast.AST) -> Iterator[tuple[_Place, ast.AST]]:
    for place in _places(tree, "", 0, False):
        for other in _changed(place.node):
            yield place, other


def _uses(tree: ast.Module) -> dict[str, frozenset[int]]:
    """The lines that use each private constant of a module, of those that only functions use."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    inside: set[ast.Name] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
                inside.update(names)
                for name in names:
                    found[name.id] |= {name.lineno, statement.lineno}
    at_import = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in inside
    }
    constants = {_scope(statement, "") for statement in tree.body if isinstance(statement, ast.Assign)}
    return {
        name: frozenset(found[name])
        for name in constants - at_import
        if name.startswith("_") and name in found
    }


def _places(node: ast.AST, scope: str, statement: int, runs: bool) -> Iterator[_Place]:
    """Depth first, without annotations, decorators, docstrings and what is raised or logged.

    `runs`: in the body of a function, so that it does not run as the file is imported.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        inside = runs or (name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _documents(child):
                continue
            line = child.lineno if isinstance(child, ast.stmt) else statement
            putter = _putter(node, name, index if isinstance(value, list) else None)
            yield _Place(scope, child, line, inside, putter)
            if not isinstance(child, ast.Raise) and not _logs(child):
                yield from _places(child, _scope(child, scope), line, inside)


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
        yield from _other_branches(node)
    elif isinstance(node, ast.Raise) or _is_call(node):
        yield ast.Pass()
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)


def _other_branches(node: ast.If | ast.IfExp | ast.While) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    other = copy.deepcopy(node)
    other.test = ast.UnaryOp(ast.Not(), node.test)
    yield other
    if isinstance(node, ast.If) and not isinstance(node.body[0], ast.Raise):
        other = copy.deepcopy(node)
        other.body = [ast.Pass()]
        yield other


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
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
