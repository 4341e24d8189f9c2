"""Rosters as differences from the previous one: of a thousand members, mostly one has changed.

A difference only saves bytes. Its receiver verifies the result like a whole roster, so the difference itself
needs no trust.
"""

from __future__ import annotations

from collections.abc import Iterator

from sealring.mesh.crypto.dsse import SignedEnvelope, encode_envelope, parse_envelope
from sealring.mesh.errors import RosterError
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, roster_hash
from sealring.v1.membership_pb2 import RosterDifference, RosterSignature, RosterUpdate, Splice


def roster_update(envelope: bytes, before: bytes = b"") -> RosterUpdate:
    """A signed roster for streams whose last signed roster was `before`; empty for none yet.

    Raises RosterError (ENVELOPE_*).
    """
    whole = RosterUpdate(envelope=envelope)
    if not before:
        return whole
    base, opened = _open(before).payload, _open(envelope)
    difference = RosterDifference(
        base=roster_hash(base),
        splices=_splices(base, opened.payload),
        signatures=(RosterSignature(key_id=name, signature=signed) for name, signed in opened.signatures),
    )
    update = RosterUpdate(difference=difference)
    return update if update.ByteSize() < whole.ByteSize() else whole


def whole_roster(update: RosterUpdate, before: bytes = b"") -> bytes:
    """The signed roster of an update, not yet verified; `before` is the last one on this stream.

    Raises RosterError (ROSTER_DIFFERENCE, ROSTER_TOO_LARGE, ENVELOPE_*).
    """
    if not update.HasField("difference"):
        return update.envelope
    difference = update.difference
    base = before and _open(before).payload
    if roster_hash(base) != difference.base:
        raise RosterError("difference is from a roster that was not received", reason="ROSTER_DIFFERENCE")
    payload = _spliced(base, difference)
    signatures = tuple((one.key_id, one.signature) for one in difference.signatures)
    return encode_envelope(SignedEnvelope(PAYLOAD_TYPE, payload, signatures))


def _spliced(base: bytes, difference: RosterDifference) -> bytes:
    parts, at, size = [], 0, 0
    for splice in difference.splices:
        kept = at + splice.kept
        parts += [base[at:kept], splice.added]
        at = kept + splice.dropped
        size += splice.kept + len(splice.added)
        if at > len(base):
            raise RosterError("difference reaches beyond its base", reason="ROSTER_DIFFERENCE")
        if size + len(base) - at > MAX_PAYLOAD_BYTES:
            raise RosterError("roster is too large for its members", reason="ROSTER_TOO_LARGE")
    return b"".join([*parts, base[at:]])


def _splices(base: bytes, payload: bytes) -> list[Splice]:
    splices, at = [], 0
    for start, end, added in _replaced(base, payload):
        splices.append(Splice(kept=start - at, dropped=end - start, added=added))
        at = end
    return splices


def _replaced(base: bytes, payload: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, added): the payload holds `added` in place of base[start:end]; in order.

    Rosters are sorted and no two entries are equal, so one pass finds the unchanged entries.
    """
    old, new = _entries(base), _entries(payload)
    where = {entry: index for index, entry in enumerate(old)}
    index = offset = first = 0
    for position, entry in enumerate([*new, None]):
        found = len(old) if entry is None else where.get(entry, -1)
        if found < index:
            continue
        gone, come = old[index:found], new[first:position]
        if len(gone) != len(come):  # entries were added or removed
            gone, come = [b"".join(gone)], [b"".join(come)]
        for was, now in zip(gone, come, strict=True):
            if was != now:
                head = _alike(was, now)
                tail = _alike(was[head:][::-1], now[head:][::-1])
                yield offset + head, offset + len(was) - tail, now[head : len(now) - tail]
            offset += len(was)
        offset, index, first = offset + len(entry or b""), found + 1, position + 1


def _entries(payload: bytes) -> list[bytes]:
    """A payload in pieces, each of which begins with an object of its JSON."""
    return [b"{" + piece for piece in payload.split(b"{")[1:]]


def _alike(one: bytes, other: bytes) -> int:
    """The length of the common beginning, in bytes."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _open(envelope: bytes) -> SignedEnvelope:
    return parse_envelope(envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
