"""`sealring chat`: which gateway and which cluster it asks, and what it shows."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster
from commands import Asker
from receiptkit import signed, statement_of

from sealring.cli.here.leftovers import temporary_folder
from sealring.mesh.pki import Role
from sealring.mesh.prompt.images import MAX_IMAGE_BYTES
from sealring.mesh.receipt.form import receipts_json
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.paths import default_state_root

PIN = "ab" * 32
KNOWN = ("--gateway", "h:1", "--root-sha256", PIN)


@pytest.fixture
def asker(host: Any) -> Asker:
    host.asker = Asker()
    return host.asker  # type: ignore[no-any-return]


def gateways(asker: Asker) -> list[str]:
    """The first gateway of each question since the last look."""
    found = [one.addresses[0] for one in asker.targets]
    asker.targets.clear()
    return found


def demo(stack: ExitStack, port: int, cluster: SigningCluster) -> Path:
    folder = stack.enter_context(temporary_folder())
    (folder / "ports.json").write_text(json.dumps({"gateway": port}))
    cluster.save(folder / "coordinator" / "operator", Role.OPERATOR)
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> SigningCluster:
    return SigningCluster(tmp_path)


def test_a_running_demo_is_found_with_its_root_key(here: Any, asker: Asker, cluster: SigningCluster) -> None:
    with ExitStack() as stack:
        folder = demo(stack, 4711, cluster)
        done = here("chat", "hi")
        assert f"found the demo in {folder}" in done.err
        (target,) = asker.targets
        assert (target.addresses, target.pin) == (["127.0.0.1:4711"], cluster.authority.root.fingerprint)
        assert target.state_file is None, "no file stays behind for each demo"
        assert here("chat", "hi", *KNOWN).status == 0
        assert here("chat", "hi", "--gateway", "127.0.0.1:4711").status == 0
        assert asker.targets[-1].pin == cluster.authority.root.fingerprint
        assert gateways(asker) == ["127.0.0.1:4711", "h:1", "127.0.0.1:4711"]
        other = demo(stack, 4712, SigningCluster(folder / "other"))
        os.utime(other / "ports.json", ns=(0, 0))
        assert here("chat", "hi").status == 0
        assert here("chat", "hi", "--gateway", "127.0.0.1:4712").status == 0
        newest, named = asker.targets
        assert newest.pin == cluster.authority.root.fingerprint != named.pin
        assert gateways(asker) == ["127.0.0.1:4711", "127.0.0.1:4712"]
    assert here("chat", "hi", "--root-sha256", PIN).status == 0
    assert gateways(asker) == ["127.0.0.1:7780"]


def test_the_users_own_cluster_comes_before_the_default_address(
    here: Any, asker: Asker, cluster: SigningCluster, host: Any
) -> None:
    host.ports.add(7780)
    root = default_state_root()
    cluster.save(root / "coordinator" / "operator", Role.OPERATOR)
    with lock_state(root):
        (root / "ports.json").write_text(json.dumps({"gateway": 4713}))
        assert here("chat", "hi").status == 0
        (target,) = asker.targets
        assert target.pin == cluster.authority.root.fingerprint
        assert target.state_file is not None
        assert target.state_file.is_relative_to(root)
        assert here("chat", "hi", *KNOWN).status == 0
        assert gateways(asker) == ["127.0.0.1:4713", "h:1"]
    assert here("chat", "hi").status == 0
    assert gateways(asker) == ["127.0.0.1:7780"]


def test_a_demo_comes_before_what_listens_at_the_default_address(
    here: Any, asker: Asker, cluster: SigningCluster, host: Any
) -> None:
    host.ports.add(7780)
    with ExitStack() as stack:
        demo(stack, 4711, cluster)
        assert here("chat", "hi").status == 0
    assert gateways(asker) == ["127.0.0.1:4711"]


def test_a_machine_that_has_joined_seals_for_its_cluster(
    here: Any, asker: Asker, cluster: SigningCluster
) -> None:
    cluster.save(default_state_root() / "node", Role.MEMBER)
    assert here("chat", "hi", "--gateway", "h:1", "--gateway", "h:2").status == 0
    (target,) = asker.targets
    assert (target.addresses, target.pin) == (["h:1", "h:2"], cluster.authority.root.fingerprint)


@pytest.mark.parametrize(("changes", "said"), [({}, ""), ({"given": 2}, " for all but its first 2 tokens")])
def test_how_much_of_an_answer_was_signed_for_is_said(
    here: Any, asker: Asker, make_signed_cluster: Any, changes: dict[str, Any], said: str
) -> None:
    cluster = make_signed_cluster(3)
    envelope = cluster.sign()
    asker.receipt = receipts_json([signed(cluster, envelope, statement_of(cluster, envelope, **changes))])
    assert here("chat", "hi", *KNOWN).err.endswith(f", with a receipt{said})\n")
    asker.receipt["choices"][0]["tail"] = {"missing": "RECEIPT_LATE"}
    assert here("chat", "hi", *KNOWN).err.endswith(", without a receipt (RECEIPT_LATE))\n")


def test_a_line_of_no_end_is_not_read_whole(here: Any, asker: Asker) -> None:
    done = here("chat", *KNOWN, stdin="x" * (2 * LONGEST))
    assert "the question is longer than" in done.err
    assert [len(one.messages[0][1]) for one in asker.asked] == [LONGEST - 2]


LONGEST = 1 << 20


@pytest.mark.parametrize(
    ("question", "typed"),
    [
        ("x" * (LONGEST + 1), ""),
        ("-", "   \n"),
        ("-", "x" * (LONGEST + 1)),
        ("-", " " * LONGEST + " hi"),
    ],
    ids=["long", "nothing typed", "long file", "cut at a blank"],
)
def test_a_question_that_is_empty_or_too_long_is_refused(
    here: Any, asker: Asker, question: str, typed: str
) -> None:
    done = here("chat", question, *KNOWN, stdin=typed)
    assert (done.status, "[BAD_QUESTION]" in done.err) == (2, True)
    assert asker.asked == []


@pytest.mark.parametrize(
    ("typed", "asked"), [(" hi \n", "hi"), ("x" * LONGEST, "x" * LONGEST)], ids=["short", "long"]
)
def test_a_question_of_a_file_is_asked_whole(here: Any, asker: Asker, typed: str, asked: str) -> None:
    assert here("chat", "-", *KNOWN, stdin=typed).status == 0
    assert asker.asked[0].messages == [("user", asked)]


def test_pictures_stand_before_the_question(here: Any, asker: Asker, tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        file.write_bytes(file.name.encode())
    done = here("chat", "which?", *KNOWN, "--image", str(files[0]), "--image", str(files[1]))
    assert done.status == 0
    assert asker.asked[0].messages == [("user", (b"a.png", b"b.png", "which?"))]


def test_a_picture_that_cannot_be_sent_is_named(here: Any, asker: Asker, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(bytes(MAX_IMAGE_BYTES + 1))
    empty = tmp_path / "empty.png"
    empty.touch()
    for file, reason in ((empty, "BAD_IMAGE"), (large, "IMAGE_TOO_LARGE")):
        done = here("chat", "hi", *KNOWN, "--image", str(file))
        assert (done.status != 0, f"[{reason}]" in done.err) == (True, True)
    assert not asker.asked
