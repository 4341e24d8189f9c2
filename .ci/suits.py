"""Whether this Python and machine can run sealring; `make env` asks before it makes anything.

Prints one sentence and exits with 1 where they cannot. Runs on every Python 3.
"""

import platform
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
OLDEST_MACOS = 14


def obstacle(version, system, machine, macos):
    """The reason why not, in one sentence; empty where it can.

    `version` is Python's as a tuple, `macos` as `platform.mac_ver` says it, empty elsewhere.
    """
    if not OLDEST <= tuple(version[:2]) <= NEWEST:
        return f"sealring needs Python 3.11 to 3.14, and this is {version[0]}.{version[1]}: set PYTHON=..."
    if system != "Darwin":
        return ""
    if machine != "arm64":
        return (
            "sealring needs a Mac with Apple silicon and a Python made for it, and this Python is for "
            f"{machine}: set PYTHON=... to another"
        )
    if int(macos.split(".")[0] or 0) < OLDEST_MACOS:
        return f"sealring needs macOS 14 or newer, for which MLX is made, and this is macOS {macos}"
    return ""


if __name__ == "__main__":
    found = obstacle(sys.version_info, platform.system(), platform.machine(), platform.mac_ver()[0])
    if found:
        sys.stderr.write(found + "\n")
    sys.exit(bool(found))
