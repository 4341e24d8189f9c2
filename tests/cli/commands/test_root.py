"""The next root metadata of a coordinator, and files without any. The transcript of `root` has the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.pki import encode_chain, expires_at

Sealring = Callable[..., Any]


def test_the_next_root_of_a_coordinator_has_a_longer_life_for_its_authority(
    here: Sealring, home: Path
) -> None:
    settings = CoordinatorSettings(state_dir=home / "made", cluster="demo")
    made = time.time() - 8 * 365 * 86_400
    init(settings, clock=lambda: made)
    first = ClusterKeys.load(settings, now=time.time())
    assert here("root", "rotate", "made/root.dsse", "--out", "draft").status == 0
    assert here("root", "sign", "draft", "--key", "made/root.key").status == 0
    assert here("root", "install", "draft", "made/root.dsse").status == 0
    second = ClusterKeys.load(settings, now=time.time())
    assert (second.root.version, second.pin) == (2, first.pin)
    assert expires_at(second.ca.certificate) - expires_at(first.ca.certificate) > 7 * 365 * 86_400
    assert second.root.ends == pytest.approx(time.time() + 3650 * 86_400, abs=3600)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x00\x00\x00\x05ab", encode_chain([b"x"])])
def test_files_that_are_no_chain_are_refused(here: Sealring, home: Path, content: bytes) -> None:
    (home / "file").write_bytes(content)
    for arguments in (("show", "file"), ("rotate", "file", "--out", "draft"), ("install", "file", "file")):
        done = here("root", *arguments)
        assert done.status not in (0, 70), done.err
        assert "Traceback" not in done.err
    assert not (home / "draft").exists()


def test_files_of_no_end_are_not_read(here: Sealring, home: Path) -> None:
    for size, reason in ((128 << 10, "ENVELOPE_TOO_LARGE"), ((128 << 10) + 1, "FILE_TOO_LARGE")):
        (home / "file").write_bytes(bytes(size))
        assert f"[{reason}]" in here("root", "show", "file").err


@pytest.mark.parametrize("command", ["init", "roster-key"])
def test_no_folder_is_made_for_a_key(here: Sealring, home: Path, command: str) -> None:
    """A volume that is not there would be a folder of this disk."""
    done = here("root", command, "--key", "volume/root.key")
    assert (done.status, "there is no folder volume" in done.err) == (2, True), done.err
    assert not (home / "volume").exists()
    (home / "volume").mkdir()
    assert here("root", command, "--key", "volume/root.key").status == 0
