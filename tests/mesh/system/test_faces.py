from __future__ import annotations

import sys
from types import ModuleType

import pytest

from sealring.mesh.system.faces import face


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With public names of a module that is imported and of a module that cannot be."""
    package, letters = ModuleType("faced"), ModuleType("faced.letters")
    vars(letters).update(a=1, b=2)
    names, vars(package)["__getattr__"] = face("faced", letters="a b", nowhere="c")
    vars(package).update(__path__=[], __all__=names)
    monkeypatch.setitem(sys.modules, "faced", package)
    monkeypatch.setitem(sys.modules, "faced.letters", letters)
    return package


def test_a_public_name_is_imported_when_it_is_asked_for(package: ModuleType) -> None:
    from faced import a, b

    assert (a, b) == (1, 2)
    assert package.__all__ == ["a", "b", "c"]
    with pytest.raises(ModuleNotFoundError, match=r"faced\.nowhere"):
        _ = package.c


def test_any_other_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'faced' has no attribute 'd'"):
        _ = package.d
    with pytest.raises(ImportError, match="cannot import name 'd' from 'faced'"):
        from faced import d  # noqa: F401
