"""The dashboard's data as JSON. Signed data is verified here; other data is shown as it was received."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from sealring.cli.calls.members import look
from sealring.cli.calls.operator import Admin
from sealring.cli.calls.verified import VerifiedAudit, describe_roster, verify_audit
from sealring.cli.terminal.output import plain
from sealring.cli.tracing import member_shares
from sealring.mesh.crypto.dsse import key_id, parse_envelope
from sealring.mesh.errors import SealringError
from sealring.mesh.pki.root import decode_chain, verify_root_chain
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE
from sealring.mesh.roster.reader import check_roster
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.trust.levels import WORDS, described

if TYPE_CHECKING:
    from sealring.v1 import admin_pb2

AUDIT_SHOWN = 50
TRACE_MILLISECONDS = 1000
_WINDOW_SECONDS = 60.0

_FIRST = "sealring_time_to_first_token_seconds_bucket"
_TOKENS = "sealring_generation_tokens_total"
_HITS = "sealring_prefix_cache_hits_total"
_ASKED = "sealring_prefix_cache_queries_total"
_FROM_DISK = "sealring_prefix_cache_disk_tokens_total"
_GAUGES = {
    "sealring_num_requests_running": "running",
    "sealring_num_requests_waiting": "waiting",
    "sealring_kv_cache_usage_perc": "kv_usage",
    "sealring_prefix_cache_tokens": "prefix_tokens",
    "sealring_prefix_cache_bytes": "prefix_bytes",
}

Sample = dict[tuple[str, str, str], float]
"""Values by metric, model and bucket."""


class GatewayLoad:
    """A gateway's load by model, over the last minute that was looked at."""

    def __init__(self, gateway: str, exposition: Callable[[], Awaitable[str]]) -> None:
        self._gateway = gateway
        self._exposition = exposition
        self._samples: deque[tuple[float, Sample]] = deque()

    async def look(self, now: float) -> list[dict[str, Any]]:
        """The gateway's load by model: requests running and waiting, KV memory in use (0 to 1), tokens per
        second, median seconds to the first token (None without requests). Of prompt tokens,
        `prefix_share` came from the prefix cache, and `disk_share` were read from disk into it. If the
        gateway does not answer, `trouble` says why."""
        try:
            newest = _sample(await self._exposition())
        except SealringError as error:
            return [{"gateway": self._gateway, "trouble": str(error)}]
        self._samples.append((now, newest))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        since, oldest = self._samples[0]
        models = sorted({model for metric, model, _ in newest if metric in _GAUGES})
        return [{"gateway": self._gateway, **_load(model, newest, oldest, now - since)} for model in models]


def _sample(exposition: str) -> Sample:
    return {
        (one.name, one.labels.get("model_name", ""), one.labels.get("le", "")): one.value
        for family in text_string_to_metric_families(exposition)
        for one in family.samples
    }


def _load(model: str, newest: Sample, oldest: Sample, seconds: float) -> dict[str, Any]:
    def grown(metric: str, bucket: str = "") -> float:
        key = metric, model, bucket
        value = newest.get(key, 0.0) - oldest.get(key, 0.0)
        return value if value >= 0 else newest.get(key, 0.0)  # a gateway that began anew counts from 0

    buckets = sorted(
        (float(bucket), grown(_FIRST, bucket))
        for metric, of, bucket in newest
        if metric == _FIRST and of == model
    )
    asked = grown(_ASKED)
    return {
        "model": model,
        **{word: newest.get((metric, model, ""), 0.0) for metric, word in _GAUGES.items()},
        "tokens_per_second": grown(_TOKENS) / seconds if seconds else None,
        "first_token": median(buckets),
        "prefix_share": grown(_HITS) / asked if asked else None,
        "disk_share": grown(_FROM_DISK) / asked if asked else None,
    }


def median(buckets: list[tuple[float, float]]) -> float | None:
    """The upper bound of the bucket with the median; buckets are (upper bound, how many up to it), ascending.

    None where nothing was observed, or more than half beyond the last bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    found = next((bound for bound, count in buckets if count * 2 >= total > 0), None)
    return None if found == float("inf") else found


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
        **found,
    }


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
