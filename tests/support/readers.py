"""Which fields of a settings object the code behind a function reads: by its source, through what it calls.

A function reaches the functions and classes of this project that it names, a class all of its methods.
Settings are known by their name: `settings.x`, `self._settings.x`, `loaded.settings.x`. It may reach more
than a call does, and never less of what is written this way.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OURS = "sealring"
_NAMES = ("settings", "_settings")


def fields_read(start: Callable[..., Any], model: type[Any], *, stop: type[Any]) -> set[str]:
    """The fields of `model` that `start` and what it reaches, but not through `stop`, read of settings."""
    found: set[str] = set()
    open_, seen = [start], {id(stop)}
    while open_:
        here = open_.pop()
        if here is model or id(here) in seen:
            continue
        seen.add(id(here))
        if inspect.isclass(here):
            open_ += [one for one in map(_function, vars(here).values()) if one is not None]
            continue
        read, of_self, reached = _look(here)
        if here.__qualname__.startswith(f"{model.__name__}."):
            read = read | of_self
        found |= read & model.model_fields.keys()
        open_ += [one for one in (_function(vars(model).get(name)) for name in read) if one is not None]
        open_ += reached
    return found


@functools.cache
def _look(function: Callable[..., Any]) -> tuple[set[str], set[str], list[Callable[..., Any]]]:
    """What a function reads of settings, what of itself, and what it reaches."""
    tree = _tree(function)
    if tree is None:
        return set(), set(), []
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if _name(node.value) in _NAMES}
    return (
        read,
        {node.attr for node in attributes if _name(node.value) == "self"},
        [*_reached(function, tree)],
    )


def _name(value: ast.expr) -> str:
    if isinstance(value, ast.Name):
        return value.id
    return value.attr if isinstance(value, ast.Attribute) else ""


def _function(member: Any) -> Callable[..., Any] | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, classmethod | staticmethod | functools.cached_property):
        member = getattr(member, "__func__", None) or getattr(member, "func", None)
    return member if inspect.isfunction(member) else None


def _tree(function: Callable[..., Any]) -> ast.AST | None:
    code = inspect.unwrap(function).__code__
    return _functions(code.co_filename).get(code.co_firstlineno)


@functools.cache
def _functions(file: str) -> dict[int, ast.AST]:
    """The functions of a file by their first lines; none of one that has nothing to do with settings."""
    source = Path(file).read_text() if file.endswith(".py") else ""
    if "settings" not in source and "typer.Context" not in source:
        return {}
    return {
        min([node.lineno, *(one.lineno for one in node.decorator_list)]): node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _reached(function: Callable[..., Any], tree: ast.AST) -> Iterator[Callable[..., Any]]:
    """The functions and classes of this project that it names."""
    plain = inspect.unwrap(function)
    names = dict(plain.__globals__)
    if plain.__closure__:
        values = [cell.cell_contents for cell in plain.__closure__]
        names |= dict(zip(plain.__code__.co_freevars, values, strict=True))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == _OURS:
            module = importlib.import_module(node.module)
            names |= {one.asname or one.name: _member(module, one.name) for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            named = names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            holder = names.get(node.value.id)
            named = (
                vars(holder).get(node.attr) if inspect.ismodule(holder) or inspect.isclass(holder) else None
            )
        else:
            continue
        named = _function(named) or named
        if (inspect.isfunction(named) or inspect.isclass(named)) and named.__module__.split(".")[0] == _OURS:
            yield named


def _member(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    return found if found is not None else importlib.import_module(f"{module.__name__}.{name}")
