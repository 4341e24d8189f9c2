"""Takes chat templates of real models and BFCL's calls out of packages.

`python unpack.py PACKAGES FOLDER`: the packages as pip fetched them, and where both are to be.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath


def unpack(packages: Path, folder: Path) -> None:
    """Raises StopIteration where a package is missing."""
    source = next(packages.glob("llama_cpp_python-*.tar.gz"))
    for made in ("jinja", "bfcl"):
        (folder / made).mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.suffix == ".jinja" and name.parent.name == "templates" and member.isfile():
                found = archive.extractfile(member)
                assert found is not None
                (folder / "jinja" / name.name).write_bytes(found.read())
    with zipfile.ZipFile(next(packages.glob("bfcl_eval-*.whl"))) as wheel:
        for path in wheel.namelist():
            name = PurePosixPath(path)
            if name.suffix == ".json" and "data" in name.parts:
                kind = "answers-" if name.parent.name == "possible_answer" else ""
                (folder / "bfcl" / f"{kind}{name.name}").write_bytes(wheel.read(path))


if __name__ == "__main__":
    unpack(*map(Path, sys.argv[1:]))
