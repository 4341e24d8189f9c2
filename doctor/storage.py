"""Room on the disk, and model folders: whether they are there, can be read, and hold what the plan names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from sealring.doctor.report import Finding, note, ok, problem, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.errors import SealringError
from sealring.mesh.names import is_sha256
from sealring.mesh.units import size

_LEAST_FREE = 1 << 30
_LITTLE_FREE = 10 << 30
_PROFILE_SECONDS = 60.0


def check(system: System, view: View) -> Iterator[Finding]:
    """Disk, the folders of `models`, and the models of the rings that this node is planned into."""
    yield _space(system, view.settings.state_dir)
    if not view.settings.models:
        yield note(
            "models.folders",
            "no model folder is set",
            "models are then found by an absolute path, or in the Hugging Face cache",
            "start it with the folder that holds them, if there is one",
            f"{view.start} --models FOLDER",
        )
    for folder in view.settings.models:
        yield _folder(system, folder)
    for model, digest in sorted({(ring.model, ring.model_digest.hex()) for ring in view.rings}):
        yield _planned(system, view, model, digest)


def parse_profile(text: str) -> str | None:
    """The digest that `python -m sealring.node.engine.profile` prints."""
    try:
        found = json.loads(text)["result"]["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) and is_sha256(found) else None


def _space(system: System, folder: Path) -> Finding:
    found = system.free_space(folder)
    if found is None:
        return unknown("disk.space", f"free space for {folder}", "the volume does not say")
    free, _ = found
    shown = f"{size(free)} free for {folder}"
    if free < _LEAST_FREE:
        why = "a node that cannot write its roster ends its rings"
        return problem("disk.space", shown, why, "make room; the largest folders are shown by", "du -xhd 2 ~")
    if free < _LITTLE_FREE:
        return warning("disk.space", shown, "macOS itself needs some for swap and updates", "make room")
    return ok("disk.space", shown)


def _folder(system: System, folder: Path) -> Finding:
    found, quoted = system.folder(folder), shlex.quote(str(folder))
    if found is None:
        return problem(
            "models.folders",
            f"the model folder {folder} is not there",
            "models in it are unknown to this node",
            "make it and put a model into it, or take it out of the setting models",
            f"mkdir -p {quoted}",
        )
    if not found.readable and found.why not in ("EACCES", "EPERM"):
        return problem(
            "models.folders",
            f"the model folder {folder} cannot be read ({found.why})",
            "models in it are unknown to this node while its volume does not answer",
            "check the volume that it is on",
            f"df -h {quoted}",
        )
    if not found.readable:
        return problem(
            "models.folders",
            f"the model folder {folder} cannot be read by user id {system.user()} ({found.why})",
            "models in it are unknown to this node. Home folders are closed to other accounts, and macOS "
            "keeps services from Desktop, Documents, Downloads, removable and network volumes",
            "move the models to a folder that the node's account may read",
            f"sudo chmod -R a+rX {quoted}",
        )
    if found.writable_by_others or found.owner not in (0, system.user()):
        return warning(
            "models.folders",
            f"others than the node's account can change {folder} (owner: user id {found.owner})",
            "whoever can change a model decides what is answered",
            "give the folder to root or to the node's account, and take the right to write from all others",
            f"sudo chown -R {system.user()} {quoted} && sudo chmod -R go-w {quoted}",
        )
    return ok("models.folders", f"{found.models} model folders in {folder}")


def _planned(system: System, view: View, model: str, digest: str) -> Finding:
    from sealring.node.models.folders import local_model

    try:
        path = local_model(model, [*view.settings.models, view.settings.state_dir / "models"])
    except SealringError as error:
        if error.reason == "MODEL_FOLDER_UNREADABLE":
            return unknown("models.planned", f"whether {model} of this node's ring is here", error.message)
        path = None
    if path is None:
        if view.settings.allow_downloads:
            return note("models.planned", f"{model} is not here and would be downloaded")
        place = shlex.quote(f"FOLDER/{Path(model).name}/")
        return problem(
            "models.planned",
            f"the model {model} of this node's ring is not here",
            "the ring cannot form without this node's layers",
            "copy it into a model folder, from a machine that has it",
            f"rsync -a OTHER:{place} {place}",
        )
    look = f"sealring model profile {shlex.quote(str(path))}"
    command = (system.python(), "-P", "-m", "sealring.node.engine.profile", str(path))
    answer = system.run(*command, seconds=_PROFILE_SECONDS)
    found = parse_profile(answer.text)
    if found is None:
        why = answer.why or "it could not be measured"
        return unknown("models.planned", f"whether {path} is the model planned", why, look)
    if found != digest:
        return problem(
            "models.planned",
            f"{path} is another model than the one planned ({found[:16]}, planned {digest[:16]})",
            "its files differ from those that the deployment was planned with",
            "copy the folder anew from a machine that has the right one, or deploy again",
            look,
        )
    return ok("models.planned", f"{path} is the model planned ({digest[:16]})")
