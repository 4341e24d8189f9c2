"""`sealring bugreport`: what is in the archive, what is left out of it, and that no secret is."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from sealring.cli.commands.bugreport import pack

TOKEN = f"sr2.{'a' * 52}.{'b' * 16}.{'c' * 52}.{'d' * 30}"
KEY = f"srk_{'a' * 16}_{'b' * 52}"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEA\n-----END PRIVATE KEY-----"


def unpacked(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        found = ((entry.name, packed.extractfile(entry)) for entry in packed.getmembers())
        return {name: data.read().decode() for name, data in found if data is not None}


def test_what_looks_like_a_secret_is_left_out() -> None:
    cut = "-----BEGIN EC PRIVATE KEY-----\nxx"
    text = f"begun {TOKEN} and {KEY}: authorization: Bearer abc.def then\n{PEM}\nended\n{cut}"
    (found,) = unpacked(pack("here", {"logs/node.log": text})).values()
    assert (
        found
        == "begun (left out) and (left out): authorization: (left out) then\n(left out)\nended\n(left out)"
    )


def test_an_archive_is_its_owners() -> None:
    with tarfile.open(fileobj=io.BytesIO(pack("here", {"b": "\ud800", "a": "x"}))) as packed:
        found = [(one.name, one.mode, one.size) for one in packed.getmembers()]
    assert found == [("here/a", 0o600, 1), ("here/b", 0o600, 1)]


def test_a_report_of_what_there_is(here: Any, home: Path) -> None:
    logs = home / "state" / "logs"
    logs.mkdir(parents=True)
    (logs / "node-0.log").write_text(f"ring_lost reason=PEER_LOST {KEY}\n")
    (logs / "node-1.log").write_bytes(b"x" * 3 + b"y" * (4 << 20))
    (logs / "gateway.log").mkdir()
    done = here("bugreport", "--output", "report.tar.gz", "--state-dir", "state", "--gateway", "127.0.0.1:1")
    assert (done.status, done.out) == (0, "")
    found = {
        name.partition("/")[2]: text for name, text in unpacked((home / "report.tar.gz").read_bytes()).items()
    }
    assert found["logs/node-0.log"] == "ring_lost reason=PEER_LOST (left out)\n"
    assert found["logs/node-1.log"] == "y" * (4 << 20), "the end of a long one"
    assert found["logs/gateway.log"] == "(cannot be read: Is a directory)"
    assert '"sealring"' in found["versions.json"]
    assert found["machine.json"].startswith("{")
    assert '"findings"' in found["doctor.json"]
    assert "NO_OPERATOR_BUNDLE" in found["missing.txt"]
    assert "UNREACHABLE" in found["missing.txt"]
    assert (home / "report.tar.gz").stat().st_mode & 0o077 == 0
    refused = here("bugreport", "--output", "state")
    assert (refused.status, "state cannot be written" in refused.err) == (2, True)
