"""The times left to this machine's certificate, its root metadata and its roster."""

from __future__ import annotations

from collections.abc import Iterator

from sealring.doctor.report import Finding, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.clock import SKEW_SECONDS

_DAY = 86400


def check(system: System, view: View) -> Iterator[Finding]:
    """The three expiry times; no finding if this machine is not enrolled."""
    if view.state is None:
        return
    from sealring.mesh.pki.certificates import expires_at, renewal_due, valid_at

    now = system.now()
    certificate = view.state.tls.certificate
    left, late = expires_at(certificate) - now, now - renewal_due(certificate)
    if not valid_at(certificate, now):
        yield problem(
            "certificate.life",
            f"this node's certificate {f'ended {_duration(-left)} ago' if left <= 0 else 'is not valid yet'}",
            "it renews by itself where the coordinator's join port can be reached",
            f"see whether {view.state.join or 'the join port'} is reachable, and the daemon's log",
        )
    elif late > 3600 and view.session:
        yield warning(
            "certificate.life",
            f"this node's certificate ends in {_duration(left)} and was not renewed",
            f"it renews at half of its life, {_duration(late)} ago",
            "see the daemon's log",
        )
    else:
        yield ok("certificate.life", f"this node's certificate holds for {_duration(left)}")
    root = view.state.root.ends - now
    if root <= 0:
        yield problem(
            "certificate.root",
            f"the root metadata ended {_duration(-root)} ago",
            "nothing that is signed under it is accepted",
            "restart the coordinator, which signs it anew, or where the root key is elsewhere draft the next",
            "sealring root rotate --help",
        )
    elif view.state.root.ends_soon(now):
        yield warning(
            "certificate.root",
            f"the root metadata ends in {_duration(root)}",
            "from then on nothing that is signed under it is accepted",
            "restart the coordinator, which signs it anew, or where the root key is elsewhere draft the next",
            "sealring root rotate --help",
        )
    elif now < view.state.root.issued - SKEW_SECONDS:
        yield problem(
            "certificate.root",
            f"the root metadata is not valid for another {_duration(view.state.root.issued - now)}",
            "nothing that is signed under it is accepted before",
            "compare the clocks of this machine and the coordinator's",
        )
    else:
        yield ok("certificate.root", f"the root metadata holds for {_duration(root)}")
    if view.roster is not None and view.session and view.roster.expires < now:
        yield problem(
            "certificate.roster",
            f"the newest roster ended {_duration(now - view.roster.expires)} ago",
            "rings end with it",
            "see whether the coordinator runs, and compare the clocks",
        )


def _duration(seconds: float) -> str:
    if seconds >= 2 * _DAY:
        return f"{seconds / _DAY:.0f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
