"""A machine for the doctor that says what a test wants, and the recorded outputs that it may say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealring.doctor.report import Finding
from sealring.doctor.system import Folder, Printed, System
from sealring.mesh.trust.attestation import UNKNOWN_POSTURE, Posture

DATA = Path(__file__).resolve().parents[1] / "data" / "doctor"
PYTHON = (
    "/opt/homebrew/Cellar/python@3.13/3.13.9/Frameworks/Python.framework/Versions/3.13/Resources/Python.app"
    "/Contents/MacOS/Python"
)


def recording(name: str) -> str:
    """A recorded output without the lines at its top that say where it is from."""
    lines = (DATA / name).read_text().splitlines(keepends=True)
    assert lines[0].startswith("# "), "say whether it was recorded on a Mac"
    return "".join(line for line in lines if not line.startswith("# "))


class FakeSystem(System):
    """`says` has the output of each command by its beginning; what it has not is not on this machine."""

    def __init__(
        self,
        says: Mapping[str, str | Printed] = {},
        *,
        platform: str = "darwin",
        now: float = 1e9,
        **answers: Any,
    ) -> None:
        super().__init__()
        self.platform = platform
        self.says = dict(says)
        self.answers = answers
        self.time = now
        self.ran: list[str] = []

    def run(self, *command: str, seconds: float = 10.0, errors: bool = False) -> Printed:
        line = " ".join(command)
        self.ran.append(line)
        found = [text for start, text in self.says.items() if line.startswith(start)]
        if not found:
            return Printed(why=f"{command[0]} is not on this machine")
        return found[0] if isinstance(found[0], Printed) else Printed(found[0])

    def executable(self) -> str:
        return str(self.answers.get("executable", PYTHON))

    def python(self) -> str:
        return "python"

    def file_limit(self) -> int:
        return int(self.answers.get("file_limit", 8192))

    def memory(self) -> int:
        return int(self.answers.get("memory", 64 << 30))

    def user(self) -> int:
        return 501

    def now(self) -> float:
        return self.time

    def package(self, name: str) -> str:
        packages: dict[str, str] = self.answers.get(
            "packages", {"sealring": "0.1.0", "mlx": "1", "mlx-lm": "2"}
        )
        return packages.get(name, "")

    def wheel_tag(self, name: str) -> str:
        return str(self.answers.get("wheel_tag", ""))

    def free_space(self, folder: Path) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self.answers.get("free_space", (100 << 30, 200 << 30))
        return found

    def folder(self, path: Path) -> Folder | None:
        found: Folder | None = self.answers.get("folder", Folder(True, 501, False, 2))
        return found

    def owner(self, path: Path) -> str:
        return "_sealring"

    def has_service(self, component: str) -> bool:
        return bool(self.answers.get("service"))

    def bind_error(self, host: str, port: int) -> str:
        return str(self.answers.get("bind_error", ""))

    def posture(self) -> Posture:
        found: Posture = self.answers.get("posture", UNKNOWN_POSTURE)
        return found


def by_id(findings: Any) -> dict[str, Finding]:
    """Findings by their ids, of which each may be there once."""
    found = list(findings)
    names = [one.id for one in found]
    assert len(set(names)) == len(names), names
    return dict(zip(names, found, strict=True))
