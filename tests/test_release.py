"""A release has the same bytes whoever builds it, wherever and whenever."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release.py"
PARTS = runpy.run_path(str(SCRIPT))
HOST = "https://host.invalid"
EPOCH = 1_790_000_000
MOST_BYTES = 4_600_000
"""The size of the wheel with both bundled models, at most."""

SETTINGS = [
    {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1", "umask": 0o022, "stamp": 1_700_000_000},
    {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "umask": 0o077, "stamp": 1_750_000_000},
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows; links stay links."""
    made = tmp_path_factory.mktemp("commit") / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, made / name, follow_symlinks=False)
    return made


def built(tree: Path, folder: Path, settings: dict[str, Any]) -> dict[str, bytes]:
    """The files of a release, built from a copy with other times, by a process with these settings."""
    shutil.copytree(tree, folder / "tree", symlinks=True)
    for file in folder.rglob("*"):
        os.utime(file, (settings["stamp"],) * 2, follow_symlinks=False)
    shown = {name: value for name, value in settings.items() if isinstance(value, str)}
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "tree"), str(folder / "out")],
        env=os.environ | shown | {"SOURCE_DATE_EPOCH": str(EPOCH)},
        umask=settings["umask"],
        check=True,
    )
    return {file.name: file.read_bytes() for file in sorted((folder / "out").iterdir())}


@pytest.fixture(scope="module")
def first(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("release") / "a longer name"
    folder.mkdir()
    return built(tree, folder, SETTINGS[0])


@pytest.mark.sweep  # a release is built so before it is signed (.github/workflows/release.yml)
def test_two_builds_in_other_folders_times_and_locales_have_equal_bytes(
    tree: Path, first: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    assert first == built(tree, tmp_path / "b", SETTINGS[1])


def test_a_release_has_its_files_and_their_sums(first: dict[str, bytes]) -> None:
    assert {Path(name).suffix for name in first} == {"", ".json", ".gz", ".whl"}
    for line in first["SHA256SUMS"].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(first[name]).hexdigest() == digest
    (wheel,) = (content for name, content in first.items() if name.endswith(".whl"))
    (sdist,) = (content for name, content in first.items() if name.endswith(".tar.gz"))
    assert len(wheel) <= MOST_BYTES
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert names[-1].endswith(".dist-info/RECORD")
    imported = {"cli/main.py", "mesh/receipt/verify.py", "testing/__init__.py", "py.typed"}
    assert {f"sealring/{name}" for name in imported} <= set(names)
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        assert {entry.mtime for entry in archive.getmembers()} == {EPOCH}
    _sbom(json.loads(first["sbom.cdx.json"]))


def _sbom(found: dict[str, Any]) -> None:
    """Names what a Mac installs, each with the version that the lock has, and no tool of developers."""
    versions = {one["name"]: one["version"] for one in found["components"]}
    assert {"mlx", "mlx-metal", "grpcio", "cryptography", "numpy", "jinja2"} <= set(versions)
    assert not {"pytest", "ruff", "mlx-cpu", "openai"} & set(versions)
    lock = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"grpcio=={versions['grpcio']}" in lock
    references = {one["bom-ref"] for one in (*found["components"], found["metadata"]["component"])}
    assert {one["ref"] for one in found["dependencies"]} == references
    assert {each for one in found["dependencies"] for each in one["dependsOn"]} <= references


def _commands() -> list[str]:
    """The commands of docs/releases.md, in their order."""
    page = (ROOT / "docs" / "releases.md").read_text("utf-8")
    return re.findall(r"^    ((?:ssh-keygen|echo|shasum) .*)$", page, re.M)


def _run(command: str, folder: Path) -> bool:
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True)
    return done.returncode == 0


def test_the_documented_key_signs_and_no_other_signature_is_taken(tmp_path: Path) -> None:
    if not shutil.which("ssh-keygen"):
        pytest.skip("ssh-keygen is not installed")
    make, allow, sign, verify, compare = _commands()
    (tmp_path / "file").write_bytes(b"release")
    sums = f"{hashlib.sha256(b'release').hexdigest()}  file\n"
    (tmp_path / "SHA256SUMS").write_text(sums)
    assert all(_run(command, tmp_path) for command in (make, allow, sign, verify))
    if shutil.which("shasum"):
        assert _run(compare, tmp_path)
    signature, signers = tmp_path / "SHA256SUMS.sig", tmp_path / "allowed_signers"
    good, known = signature.read_bytes(), signers.read_text()
    (tmp_path / "SHA256SUMS").write_text(sums.replace("file", "other"))
    assert not _run(verify, tmp_path), "over other sums"
    (tmp_path / "SHA256SUMS").write_text(sums)
    for shown in ("", known.replace("release@", "other@"), known.replace("sealring-release", "git")):
        signers.write_text(shown)
        assert not _run(verify, tmp_path), shown
    signers.unlink()
    assert not _run(verify, tmp_path), "without the public half"
    signers.write_text(known)
    signature.unlink()
    for changed in (make.replace("release-key", "other"), sign.replace("release-key", "other")):
        assert _run(changed, tmp_path)
    assert not _run(verify, tmp_path), "by another key"
    signature.write_bytes(good)
    assert _run(verify, tmp_path)


def test_a_release_is_signed_by_the_documented_commands() -> None:
    """And checked by the public half that the repository has: without that there is no release."""
    job = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    for part in ("-Y sign -f build/key -n sealring-release", "-Y verify -f deploy/allowed_signers"):
        assert part in job


def report(**changes: Any) -> dict[str, Any]:
    """What pip says of one wheel."""
    lock = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    one = {"name": "numpy", "version": lock["numpy"], "url": f"{HOST}/numpy.whl", "sha256": "ab" * 32}
    one |= changes
    info = {"url": one["url"], "archive_info": {"hashes": {"sha256": one["sha256"]}}}
    named = {"name": one["name"], "version": one["version"]}
    return {"install": [{"metadata": named, "download_info": info}]}


def test_the_formula_has_the_release_and_the_wheels_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "sealring-1-py3-none-any.whl").write_bytes(b"release")
    text = PARTS["formula"](ROOT, report(), f"{HOST}/v1/", tmp_path)
    assert f'url "{HOST}/v1/sealring-1-py3-none-any.whl", using: :nounzip\n  version "1"' in text
    assert hashlib.sha256(b"release").hexdigest() in text
    assert f'resource "numpy" do\n    url "{HOST}/numpy.whl", using: :nounzip\n' in text
    assert "@" not in text.replace("python@3.14", "").replace("@rpath", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1.0"},
        {"url": f'{HOST}/a"; system "x'},
        {"sha256": "no"},
        {"url": "http://host.invalid/a"},
    ],
)
def test_a_report_that_is_not_of_the_lock_makes_no_formula(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "sealring-1-py3-none-any.whl").write_bytes(b"release")
    with pytest.raises(SystemExit):
        PARTS["formula"](ROOT, report(**changes), f"{HOST}/v1", tmp_path)


@pytest.mark.sweep  # that an installed wheel runs is shown by .ci/wheel
def test_the_lines_of_the_formula_install_offline(first: dict[str, bytes], tmp_path: Path) -> None:
    """The words of its two commands, in an environment as a Mac's Python makes it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, content in first.items():
        if name.endswith(".whl"):
            (wheels / name).write_bytes(content)
    _small_wheel(wheels / "other-1-py3-none-any.whl")
    text = (ROOT / PARTS["TEMPLATE"]).read_text("utf-8")
    (making,) = re.findall(r"system python, (.*), libexec", text)
    (pip,) = re.findall(r'pip = \[libexec/"bin/python", (.*)\]', text)
    libexec = tmp_path / "libexec"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    for command in (
        [sys.executable, *re.findall(r'"([^"]+)"', making), libexec],
        [libexec / "bin" / "python", *re.findall(r'"([^"]+)"', pip), *sorted(wheels.iterdir())],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
    (inside,) = libexec.glob("lib/python3*/site-packages")
    assert (inside / "other.py").is_file()
    (inside / "dependencies.pth").write_text("\n".join(site.getsitepackages()))  # its resources are not here
    (tmp_path / "sealring").symlink_to(libexec / "bin" / "sealring")
    said = subprocess.run(
        [tmp_path / "sealring", "--version"], env=environment, capture_output=True, timeout=100
    )
    (release,) = (name for name in first if name.endswith(".whl"))
    assert said.stdout.decode().strip() == release.split("-")[1]


def _small_wheel(file: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: other\nVersion: 1\n"
    form = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("other.py", "")
        made.writestr("other-1.dist-info/METADATA", metadata)
        made.writestr("other-1.dist-info/WHEEL", form)
        made.writestr("other-1.dist-info/RECORD", "")


def test_no_download_address_stands_in_the_recipes() -> None:
    for file in (SCRIPT, *(ROOT / "deploy").rglob("*"), ROOT / ".github" / "workflows" / "release.yml"):
        found = re.findall(r"\w+://[\w.-]+", file.read_text("utf-8")) if file.is_file() else []
        assert [one for one in found if not one.startswith("http://www.apple.com")] == [], file
