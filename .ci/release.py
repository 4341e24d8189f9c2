"""The files of a release: wheel, sdist, SBOM and checksums, the same bytes on every build of one commit.

`python .ci/release.py TREE OUT` builds the tree (a copy of a commit, without files that git does not know)
into the folder OUT. The bytes depend on the tree, on SOURCE_DATE_EPOCH, and on the versions of setuptools
and zlib: not on folder, time, locale, time zone, umask or the order of a directory.

`python .ci/release.py --formula REPORT BASE OUT` fills in the Homebrew formula for what lies in OUT. BASE is
the address of the folder from which the release will be downloaded. REPORT is what
`pip install --dry-run --ignore-installed --report` writes on a Mac with Apple silicon.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEMPLATE = Path("deploy", "homebrew", "Formula", "sealring.rb.in")
TARGET = {
    "sys_platform": "darwin",
    "platform_system": "Darwin",
    "platform_machine": "arm64",
    "os_name": "posix",
}
"""The SBOM lists what is installed on a Mac, whatever machine builds it."""

_BUILD = "import setuptools.build_meta as b, sys; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"


def build(tree: Path, out: Path, epoch: int) -> None:
    """Builds the release of `tree` into the empty folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copied, made = Path(folder, "tree"), Path(folder, "made")
        shutil.copytree(
            tree, copied, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info")
        )
        made.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        fixed = {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", _BUILD, str(made)]
        subprocess.run(command, cwd=copied, env=kept | fixed, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        for file in sorted(made.iterdir()):
            again = _wheel if file.suffix == ".whl" else _sdist
            (out / file.name).write_bytes(again(file, epoch))
    (out / "sbom.cdx.json").write_bytes(sbom(tree, epoch))
    files = sorted(file for file in out.iterdir() if file.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / "SHA256SUMS").write_text("".join(sums))


def _wheel(file: Path, epoch: int) -> bytes:
    """The wheel with its files in order, of one time and one mode; RECORD comes last, as wheels have it."""
    date = time.gmtime(max(epoch, 315532800))[:6]  # a zip file's times begin in 1980
    buffer = io.BytesIO()
    with zipfile.ZipFile(file) as found, zipfile.ZipFile(buffer, "w") as made:
        names = sorted(found.namelist(), key=lambda name: (name.endswith(".dist-info/RECORD"), name))
        for name in names:
            entry = zipfile.ZipInfo(name, date)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            made.writestr(entry, found.read(name), compresslevel=9)
    return buffer.getvalue()


def _sdist(file: Path, epoch: int) -> bytes:
    """The sdist with its files in order, of one time, one owner and one mode."""
    plain = io.BytesIO()
    form = tarfile.PAX_FORMAT
    with tarfile.open(file) as found, tarfile.open(fileobj=plain, mode="w", format=form) as made:
        for entry in sorted(found.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            made.addfile(entry, found.extractfile(entry) if entry.isfile() else None)
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, buffer, mtime=epoch) as packed:
        packed.write(plain.getvalue())
    return buffer.getvalue()


def sbom(tree: Path, epoch: int) -> bytes:
    """CycloneDX 1.6: sealring, and what its lock installs beside it on a Mac."""
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
    versions = _locked(tree)
    needs = {project["name"]: _wanted(project["dependencies"])}
    waiting = sorted(needs[project["name"]])
    while waiting:
        name = waiting.pop()
        if name not in needs:
            needs[name] = _needs(name, versions)
            waiting.extend(sorted(needs[name]))
    versions[project["name"]] = project["version"]
    parts = [_component(name, versions[name]) for name in sorted(needs) if name != project["name"]]
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": _component(project["name"], project["version"], kind="application"),
        },
        "components": parts,
        "dependencies": [
            {
                "ref": _reference(name, versions[name]),
                "dependsOn": [_reference(each, versions[each]) for each in sorted(needs[name])],
            }
            for name in sorted(needs)
        ],
    }
    return json.dumps(whole, indent=1, sort_keys=True).encode() + b"\n"


def _locked(tree: Path) -> dict[str, str]:
    """The versions of constraints.txt, by normalized names."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (tree / "constraints.txt").read_text("utf-8"), re.M)
    return {canonicalize_name(name): version for name, version in lines}


def _wanted(requirements: list[str]) -> set[str]:
    """The packages that these requirements install on a Mac, without extras."""
    parsed = [Requirement(text) for text in requirements]
    return {
        canonicalize_name(one.name)
        for one in parsed
        if one.marker is None or one.marker.evaluate({**TARGET, "extra": ""})
    }


def _needs(name: str, versions: dict[str, str]) -> set[str]:
    """The packages that a package installs. One that the lock does not name has the version asked for."""
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return set()  # a wheel for Macs only, which needs nothing
    found = _wanted(requirements)
    for text in requirements:
        one = Requirement(text)
        pins = [pin.version for pin in one.specifier if pin.operator == "=="]
        if canonicalize_name(one.name) in found and pins:
            versions.setdefault(canonicalize_name(one.name), pins[0])
    if lacking := {each for each in found if each not in versions}:
        raise SystemExit(f"constraints.txt does not lock {', '.join(sorted(lacking))}, which {name} installs")
    return found


def _reference(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _component(name: str, version: str, kind: str = "library") -> dict[str, Any]:
    reference = _reference(name, version)
    return {"type": kind, "name": name, "version": version, "purl": reference, "bom-ref": reference}


def formula(tree: Path, report: dict[str, Any], base: str, out: Path) -> str:
    """The Homebrew formula: the template with the release's address and hash, and a resource for each wheel.

    The wheels are those that pip has chosen on a Mac, with the hashes that it names. Raises SystemExit for a
    report that names another version than the lock.
    """
    (wheel,) = out.glob("*.whl")
    locked = _locked(tree)
    resources = []
    for one in sorted(report["install"], key=lambda one: canonicalize_name(one["metadata"]["name"])):
        name, version = canonicalize_name(one["metadata"]["name"]), one["metadata"]["version"]
        if name == "sealring":
            continue
        if locked.get(name, version) != version:
            raise SystemExit(f"pip chose {name} {version}, and constraints.txt has {locked[name]}")
        info = one["download_info"]
        resources.append(_resource(name, info["url"], info["archive_info"]["hashes"]["sha256"]))
    values = {
        "URL": f"{base.rstrip('/')}/{wheel.name}",
        "VERSION": wheel.name.split("-")[1],
        "SHA256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "RESOURCES": "\n".join(resources).rstrip("\n"),
    }
    text = (tree / TEMPLATE).read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _resource(name: str, url: str, digest: str) -> str:
    if not re.fullmatch(r"https://[\w./%:+-]+", url) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise SystemExit(f"pip's report of {name} has no address or hash that can be used")
    lines = [f'resource "{name}" do', f'  url "{url}", using: :nounzip', f'  sha256 "{digest}"', "end"]
    return "".join(f"  {line}\n" for line in lines)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--formula"]:
        report, base, out = json.loads(Path(arguments[1]).read_text()), arguments[2], Path(arguments[3])
        made = out / "homebrew" / "Formula"
        made.mkdir(parents=True, exist_ok=True)
        (made / "sealring.rb").write_text(formula(Path("."), report, base, out))
        return
    tree, out = map(Path, arguments)
    build(tree, out, int(os.environ["SOURCE_DATE_EPOCH"]))


if __name__ == "__main__":
    main(sys.argv[1:])
