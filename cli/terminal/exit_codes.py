"""What the exit status of `sealring` means; scripts may rely on it.

| status | meaning |
|---|---|
| 0 | done |
| 1 | a fault of sealring itself |
| 2 | the command line or another input is wrong |
| 3 | the named thing does not exist |
| 4 | the named thing exists already |
| 5 | no valid credential |
| 6 | not allowed, or a check of trust failed |
| 7 | the system, its settings or its files are not in the state that the command needs |
| 8 | another change came first |
| 9 | a limit or memory is used up |
| 10 | not reachable or not serving just now |
| 11 | it took too long |
| 12 | cancelled |
| 13 | the command ran and its check failed, or found a problem (`model check`, `doctor`) |
| 14 | neither proved nor refuted by what was given (`receipt verify --roster`) |
| 130 | interrupted by Ctrl-C |
| 143 | ended by SIGTERM |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sealring.mesh.errors import ReceiptUndecided, SealringError

OK = 0
FAULT = 1
USAGE = 2
CHECK_FAILED = 13
UNDECIDED = 14
INTERRUPTED = 130

BY_CODE: Mapping[str, int] = MappingProxyType(
    {
        "UNKNOWN": FAULT,
        "INTERNAL": FAULT,
        "INVALID_ARGUMENT": USAGE,
        "NOT_FOUND": 3,
        "ALREADY_EXISTS": 4,
        "UNAUTHENTICATED": 5,
        "PERMISSION_DENIED": 6,
        "FAILED_PRECONDITION": 7,
        "ABORTED": 8,
        "RESOURCE_EXHAUSTED": 9,
        "UNAVAILABLE": 10,
        "DEADLINE_EXCEEDED": 11,
        "CANCELLED": 12,
    }
)


def exit_code(error: SealringError) -> int:
    """The exit status that stands for an error of the tree."""
    return UNDECIDED if isinstance(error, ReceiptUndecided) else BY_CODE.get(error.code, FAULT)
