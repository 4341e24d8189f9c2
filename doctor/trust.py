"""The trust level that this machine has, and the best that it could have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sealring.doctor.report import Finding, note, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.trust.levels import SCORES, TrustLevel

if TYPE_CHECKING:
    from sealring.mesh.trust.attestation import Posture

_STALE_SECONDS = 900
_WORTH = {
    TrustLevel.SELF_SIGNED: ": this Mac's own claim, which nobody else vouches for",
    TrustLevel.HARDWARE: ": whoever manages this Mac vouches for it, with Apple's attestation",
}
_REMEDIES = {
    "sip": ("System Integrity Protection", "in recovery: csrutil enable"),
    "secure_boot": ("Full Security at startup", "in recovery, with Startup Security Utility"),
    "authenticated_root": ("the sealed system volume", "in recovery: csrutil authenticated-root enable"),
    "filevault": ("FileVault", "sudo fdesetup enable"),
}


def check(system: System, view: View) -> Iterator[Finding]:
    """The level that the roster states, whether it holds, and what stands in the way of a better one."""
    member = view.member
    if member is not None:
        shown = f"the roster states trust {member.level}, score {member.trust}{_WORTH.get(member.level, '')}"
        if member.trust < SCORES[member.level]:
            yield warning(
                "trust.level",
                f"{shown}, below what that level is worth",
                "its evidence is old, or its kind of key is not allowed by the coordinator",
                "see its log for challenges, and the coordinator's setting software_identity_allowed",
            )
        else:
            yield ok("trust.level", shown)
        if view.session and system.now() - member.challenged_at > _STALE_SECONDS:
            yield warning(
                "trust.challenge", "this node has not answered a challenge for long", "trust goes with it"
            )
        if view.roster is not None and member.trust < view.roster.trust_floor:
            yield problem(
                "trust.floor",
                f"trust {member.trust} is below the cluster's floor of {view.roster.trust_floor}",
                "this node is used in no ring",
                "raise its level, or lower trust_floor at the coordinator",
            )
    if system.platform == "darwin":
        yield from _possible(system.posture(), member.level if member else None)
    else:
        yield note(
            "trust.possible",
            "this machine can have the level software",
            "it has no Secure Enclave: the identity key is in a file",
        )


def _possible(posture: Posture, has: TrustLevel | None) -> Iterator[Finding]:
    for name, (what, how) in _REMEDIES.items():
        state = getattr(posture, name)
        if state is not True:
            said = "is off" if state is False else "could not be determined"
            why = "a level above software needs it"
            yield note(f"trust.{name}", f"{what} {said}", why, "turn it on", how)
    if not posture.complete_and_good:
        yield note("trust.possible", "this Mac can have the level software as it is")
    elif has in (TrustLevel.SELF_SIGNED, TrustLevel.HARDWARE):
        yield ok("trust.possible", "this Mac's protections are all on")
    else:
        yield note(
            "trust.possible",
            "this Mac could have the level self_signed",
            "its protections are all on; with the helper its identity key is in the Secure Enclave. "
            "That is this Mac's own claim then, which nobody else vouches for",
            "build the helper of deploy/enclave, set enclave_helper to it, and join again",
            "sealring join ADDRESS",
        )
