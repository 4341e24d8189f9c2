"""What is done so that a folder is in no backup and no search index.

Not run on a Mac yet: there Time Machine's attribute itself is looked at, elsewhere one that anybody may set.
"""

from __future__ import annotations

import errno
import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from sealring.mesh.system.backups import EXCLUDED, leave_out

NAME = EXCLUDED if sys.platform == "darwin" else f"user.{EXCLUDED}"


def attribute(folder: Path) -> bytes:
    if sys.platform == "darwin":
        shown = subprocess.run(
            ["/usr/bin/xattr", "-p", "-x", NAME, str(folder)], check=True, capture_output=True
        )
        return bytes.fromhex(shown.stdout.decode())
    try:
        return os.getxattr(folder, NAME)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            pytest.skip("the file system has no attributes")
        raise


def test_a_folder_is_marked_for_time_machine_spotlight_and_others(tmp_path: Path) -> None:
    for _ in range(2):
        leave_out(tmp_path, NAME)
    assert (tmp_path / ".metadata_never_index").read_bytes() == b""
    assert (tmp_path / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert plistlib.loads(attribute(tmp_path)) == "com.apple.backupd"


def test_a_file_system_without_the_attribute_is_no_error(tmp_path: Path) -> None:
    leave_out(tmp_path, "nobody.knows this")
    assert (tmp_path / ".metadata_never_index").exists()
