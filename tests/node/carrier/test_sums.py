"""On memory that the C library gives, as MLX gets it; in processes of their own, which may hold little."""

import subprocess
import sys

import pytest

from node.carrier import sums

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="given back on Linux only")

PRELUDE = """
import ctypes, sys
from pathlib import Path
from node.carrier.sums import SUM_BYTES, give_back_sums

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p

def block(size, fill=0):
    address = library.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, fill, size)
    return address

def held():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024
"""


def run(code: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=50, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_zeros_are_given_back_and_read_as_zeros() -> None:
    given, before, after, total, written = run("""
address = block(SUM_BYTES)
before = held()
given = give_back_sums()
after = held()
content = (ctypes.c_ubyte * SUM_BYTES).from_address(address)
total = sum(bytes(content))
ctypes.memset(address, 7, SUM_BYTES)
print(given, before, after, total, bytes(content).count(7))
library.free(ctypes.c_void_p(address))
""")
    assert given == written == sums.SUM_BYTES
    assert before - after > sums.SUM_BYTES * 0.9
    assert total == 0


@pytest.mark.parametrize("place", ["0", "5000", "SUM_BYTES // 2", "SUM_BYTES - 1"])
def test_a_block_that_is_in_use_stays_as_it_is(place: str) -> None:
    given, count, value = run(f"""
address = block(SUM_BYTES)
content = (ctypes.c_ubyte * SUM_BYTES).from_address(address)
content[{place}] = 9
given = give_back_sums() if {place} >= 4096 else 0
print(given, SUM_BYTES - bytes(content).count(0), content[{place}])
""")
    assert (given, count, value) == (0, 1, 9)


@pytest.mark.parametrize("size", ["SUM_BYTES // 2", "SUM_BYTES - 4096", "SUM_BYTES + 4096", "2 * SUM_BYTES"])
def test_other_blocks_are_left_alone(size: str) -> None:
    assert run(f"block({size}); print(give_back_sums())") == [0]


def test_a_block_that_shares_a_mapping_with_others_is_found() -> None:
    """Linux joins mappings that lie side by side."""
    given, marks = run("""
import mmap
around = [block(1 << 20, 5) for _ in range(4)]
addresses = [block(SUM_BYTES)]
around += [block(1 << 20, 5) for _ in range(4)]
print(give_back_sums(), sum(bytes((ctypes.c_ubyte * (1 << 20)).from_address(one)).count(5) for one in around))
""")
    assert given == sums.SUM_BYTES
    assert marks == 8 << 20


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sums, "_private_memory", lambda: pytest.fail("looked"))
    assert sums.give_back_sums() == 0
