"""The dashboard's data as JSON. Signed data is verified here; other data is shown as it was received."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sealring.cli.calls.gateway import GatewayCalls
from sealring.cli.calls.members import look
from sealring.cli.calls.operator import Admin
from sealring.cli.calls.usage import added_up, first_day
from sealring.cli.calls.verified import VerifiedAudit, describe_roster, verify_audit
from sealring.cli.fitting.machines import Mac
from sealring.cli.fitting.showing import lacking_of
from sealring.cli.terminal.output import plain
from sealring.cli.tracing import member_shares
from sealring.mesh.crypto.dsse import key_id, parse_envelope
from sealring.mesh.errors import PermissionDenied, SealringError
from sealring.mesh.member.joincode import show_code
from sealring.mesh.pki.root import decode_chain, verify_root_chain
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE
from sealring.mesh.roster.reader import check_roster
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.trust.levels import WORDS, described

if TYPE_CHECKING:
    from sealring.v1 import admin_pb2

AUDIT_SHOWN = 50
USAGE_DAYS = 30
TRACE_MILLISECONDS = 500


async def cluster(admin: Admin, pin: bytes, now: float) -> dict[str, Any]:
    """Nodes, gateways and deployments as `sealring status` shows them, and the verified roster.

    The nodes get what the roster says of them: when they were attested, and last challenged. Raises what the
    coordinator answers with, RosterError.
    """
    answer = await admin.call("GetRoster")
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=now)
    roster = describe_roster(check_roster(answer.roster, root, now=now))
    signed = parse_envelope(answer.roster, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    known = {key_id(key) for key in root.roster_keys}
    members = {one["id"]: one for one in roster["members"]}
    found = await look(admin)
    for node in found["nodes"]:
        listed = members.get(node["id"], {})
        node["listed"] = bool(listed)
        node |= {name: listed.get(name) for name in ("attested_at", "challenged_at", "key_type")}
    return {
        "now": now,
        "levels": {str(level): {"shown": described(level), "words": words} for level, words in WORDS.items()},
        "coordinator": admin.address,
        "root": pin.hex(),
        "roster": {name: roster[name] for name in ("cluster", "version", "hash", "issued", "expires")}
        | {"signers": [name for name, _ in signed.signatures if name in known]},
        "lacking": _lacking(found["nodes"]),
        **found,
    }


def _lacking(nodes: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What each model on a node's disk lacks in bytes, by what `model fits` says of the memory that no ring
    has; 0 for one that fits."""
    macs: tuple[Mac, ...] = ()
    nodes = [node for node in nodes if "heartbeat" in node]
    for node in nodes:
        beat = node["heartbeat"]
        left = beat["memory_usable"] - sum(ring["memory"] for ring in node["rings"])
        if node["state"] == "online" and left > 0:
            macs = (*macs, Mac(node["name"], beat["memory_total"], left))
    held = {one["name"]: one["size"] for node in nodes for one in node["heartbeat"]["models"]}
    return {name: lacking_of(name, size, macs) if macs else size for name, size in held.items() if size}


class Audit:
    """The audit log, of which each look verifies what is new since the last."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._seen: VerifiedAudit | None = None
        self._kept: list[admin_pb2.AuditEntry] = []

    async def look(self) -> dict[str, Any]:
        """The newest entries, the newest first, and whether the whole chain holds. If it does not hold,
        `trouble` says why, and the entries are shown unverified."""
        newest = deque(self._kept[:-1], AUDIT_SHOWN)  # the last is read again: it may have been cut off
        try:
            self._seen = found = await verify_audit(self._admin, self._seen, newest)
        except SealringError as error:
            page = await self._admin.call("ListAuditLog", limit=AUDIT_SHOWN, newest=True)
            return {"entries": plain(page)["entries"][::-1], "trouble": str(error)}
        self._kept = list(newest)
        entries = [plain(one) for one in reversed(newest)]
        return {"entries": entries, "trouble": "", "count": found.last - found.first + 1}


async def trace(admin: Admin, ring: str) -> list[dict[str, Any]]:
    """Each member's shares of a second by activity, in percent, or why it gave none (`trouble`)."""
    found = await admin.call("TraceRing", ring=ring, milliseconds=TRACE_MILLISECONDS)
    shares = {one.rank: one for one in member_shares(found)}
    return [
        {"rank": one.rank, "name": one.name, "trouble": str(from_problem(one.problem))}
        if one.rank not in shares
        else {"rank": one.rank, "name": one.name, "idle": shares[one.rank].idle, **shares[one.rank].shares}
        for one in found.members
    ]


async def usage(gateways: Sequence[GatewayCalls], now: float) -> dict[str, Any]:
    """What was used in the last 30 days, by day and by key, and the quotas of keys. `trouble` names gateways
    that do not answer, whose counts lack then."""
    asked = (one.usage(first_day(now, USAGE_DAYS)) for one in gateways)
    found = await asyncio.gather(*asked, return_exceptions=True)
    answers = [one for one in found if not isinstance(one, BaseException)]
    return {
        "days": added_up(answers, ["day"]),
        "keys": added_up(answers, ["key", "model"]),
        "quotas": [plain(key) for one in answers for key in one.keys if key.tokens_a_day],
        "since": first_day(now, USAGE_DAYS),
        "trouble": "; ".join(str(one) for one in found if isinstance(one, SealringError)),
    }


async def join_code(admin: Admin) -> dict[str, Any]:
    """The code with which machines join, if there is one and this operator may see it."""
    try:
        found = plain(await admin.call("ShowJoinCode"))
    except PermissionDenied as error:
        return {"code": "", "trouble": str(error), "at": error.metadata.get("machine", "the first machine")}
    return {**found, "code": show_code(found["code"]) if found["code"] else "", "trouble": ""}
