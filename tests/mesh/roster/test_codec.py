"""Well-formed rosters: what `sign_roster` refuses to sign is what a reader refuses to believe."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.crypto import (
    KeyType,
    SoftwareSigner,
    canonical_json,
    encode_envelope,
    member_id,
    parse_envelope,
    sign_envelope,
)
from sealring.mesh.errors import NotFound, RosterError
from sealring.mesh.roster import (
    MAX_PAYLOAD_BYTES,
    PAYLOAD_TYPE,
    Gateway,
    Revoked,
    Ring,
    RingMember,
    Roster,
    check_roster,
    complete_roster,
    encode_roster,
    sign_roster,
)
from sealring.mesh.roster.codec import fits, parse_roster, size_cap
from sealring.mesh.trust.levels import TrustLevel

NOW = 1_800_000_000
SHARED = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read(cluster: Any, payload: bytes) -> Any:
    """What a reader says to a payload that the roster key did sign."""
    envelope = sign_envelope(PAYLOAD_TYPE, payload, cluster.authority.roster_signers)
    return check_roster(envelope, cluster.authority.root, now=NOW)


def refusal(cluster: Any, payload: bytes) -> str:
    with pytest.raises(RosterError) as error:
        read(cluster, payload)
    return error.value.reason


def payload(cluster: Any, **changes: Any) -> bytes:
    """The payload of a draft with changes, taken as it is: nothing recomputed, nothing refused."""
    return encode_roster(dataclasses.replace(complete_roster(cluster.draft), **changes))


def refused_alike(cluster: Any, **changes: Any) -> str:
    """The reason, after checking that signer and reader agree."""
    draft = dataclasses.replace(complete_roster(cluster.draft), **changes)
    with pytest.raises(RosterError) as error:
        sign_roster(draft, cluster.authority.roster_signers)
    assert refusal(cluster, encode_roster(draft)) == error.value.reason
    return error.value.reason


def test_round_trip(cluster: Any) -> None:
    draft = complete_roster(cluster.draft)
    roster = cluster.verified()
    assert dataclasses.replace(roster, hash=b"") == draft
    assert encode_roster(roster) == encode_roster(draft)
    assert roster.min_trust == roster.rings[0].min_trust == 10


def test_lookups(cluster: Any) -> None:
    roster = cluster.verified()
    ring = roster.ring("demo-0")
    first, second, third = ring.members
    assert ring.link_peers(0) == (third, second)
    assert ring.link_peers(2) == (second, first)
    assert ring.member(first.id) is first
    assert roster.member(first.id).id == first.id
    gateway = roster.gateways[0]
    assert roster.gateway(gateway.id) is gateway
    assert roster.rings_of(gateway.id) == ()
    assert first.id not in {one.id for one in roster.revoked}
    for lookup in (
        lambda: roster.ring("x"),
        lambda: roster.member("x"),
        lambda: roster.gateway("x"),
        lambda: ring.member("x"),
        lambda: ring.link_peers(3),
        lambda: ring.link_peers(-1),
    ):
        with pytest.raises(NotFound):
            lookup()
    assert not roster.expired(NOW + 659)
    assert roster.expired(NOW + 660)


def test_an_id_cannot_be_paired_with_another_key(cluster: Any) -> None:
    first, second, *rest = complete_roster(cluster.draft).members
    swapped = (
        dataclasses.replace(first, identity_key=second.identity_key),
        dataclasses.replace(second, identity_key=first.identity_key),
        *rest,
    )
    assert refused_alike(cluster, members=swapped) == "ROSTER_MEMBERS"
    off_curve = dataclasses.replace(first, identity_key=b"\x04" + bytes(64))
    assert refused_alike(cluster, members=(off_curve, second, *rest)) == "ROSTER_MEMBERS"


def test_members_are_unique_and_sorted(cluster: Any) -> None:
    members = complete_roster(cluster.draft).members
    assert refused_alike(cluster, members=tuple(reversed(members))) == "ROSTER_MEMBERS"
    assert refused_alike(cluster, members=(members[0], *members)) == "ROSTER_MEMBERS"
    one_key = tuple(dataclasses.replace(member, sealing_key=bytes(32)) for member in members)
    assert refused_alike(cluster, members=one_key) == "ROSTER_MEMBERS"


def test_a_key_is_member_or_gateway(cluster: Any) -> None:
    member = complete_roster(cluster.draft).members[0]
    both = (Gateway(member.id, member.identity_key),)
    assert refused_alike(cluster, gateways=both) == "ROSTER_MEMBERS"
    gateway = cluster.draft.gateways[0]
    assert refused_alike(cluster, gateways=(gateway, gateway)) == "ROSTER_MEMBERS"


def test_revoked_but_listed(cluster: Any) -> None:
    member = complete_roster(cluster.draft).members[1]
    gateway = cluster.draft.gateways[0]
    for party in (member, gateway):
        entry = Revoked(party.id, party.identity_key, 1, NOW)
        assert refused_alike(cluster, revoked=(entry,)) == "ROSTER_REVOKED"
    for at, taken in ((member.enrolled - 1, True), (member.enrolled, False)):  # it has joined again since
        entry = Revoked(member.id, member.identity_key, 0, at)
        if taken:
            assert cluster.verified(revoked=(entry,)).revoked == (entry,)
        else:
            assert refused_alike(cluster, revoked=(entry,)) == "ROSTER_REVOKED"
    stranger = SoftwareSigner.generate().public_key
    entry = Revoked(member_id(stranger), stranger, 1, NOW)
    assert refused_alike(cluster, revoked=(entry, entry)) == "ROSTER_REVOKED"
    roster = cluster.verified(revoked=(entry,))
    assert entry.id in {one.id for one in roster.revoked}


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 3), (4, 6), (6, 9)],
        [(0, 3), (2, 6), (6, 9)],
        [(0, 3), (3, 6), (6, 8)],
        [(0, 3), (3, 6), (6, 10)],
        [(1, 3), (3, 6), (6, 9)],
        [(0, 3), (3, 3), (3, 9)],
        [(3, 6), (0, 3), (6, 9)],
        [(0, 9), (0, 9), (0, 9)],
    ],
)
def test_layers_are_contiguous_disjoint_and_complete(cluster: Any, ranges: list[tuple[int, int]]) -> None:
    ring = complete_roster(cluster.draft).rings[0]
    members = tuple(
        dataclasses.replace(member, layers=layers)
        for member, layers in zip(ring.members, ranges, strict=True)
    )
    rings = (dataclasses.replace(ring, members=members),)
    assert refused_alike(cluster, rings=rings) == "ROSTER_RINGS"


def cut_for_prompts(cluster: Any, ranges: list[tuple[int, int] | None]) -> Ring:
    ring = complete_roster(cluster.draft).rings[0]
    members = tuple(
        dataclasses.replace(member, prompts=layers)
        for member, layers in zip(ring.members, ranges, strict=True)
    )
    return dataclasses.replace(ring, members=members)


def test_prompts_may_be_cut_otherwise_and_layers_are_held_twice(cluster: Any) -> None:
    ring = cut_for_prompts(cluster, [(0, 5), (5, 7), (7, 9)])
    (found,) = cluster.verified(rings=(ring,)).rings
    assert found == ring
    assert [member.held for member in found.members] == [(0, 5), (3, 7), (6, 9)]
    plain = complete_roster(cluster.draft)
    assert b"prompts" not in encode_roster(plain), "releases that know no such cut read it"


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 5), (5, 7), None],
        [(0, 5), (5, 7), (7, 8)],
        [(0, 5), (4, 7), (7, 9)],
        [(0, 2), (2, 7), (7, 9)],
        [(0, 7), (7, 8), (8, 9)],
        [(0, 5), (5, 5), (5, 9)],
    ],
)
def test_a_cut_for_prompts_is_complete_and_goes_one_member_forward(
    cluster: Any, ranges: list[tuple[int, int] | None]
) -> None:
    assert refused_alike(cluster, rings=(cut_for_prompts(cluster, ranges),)) == "ROSTER_RINGS"


def test_tensor_members_all_hold_all_layers(cluster: Any) -> None:
    ring = complete_roster(cluster.draft).rings[0]
    whole = tuple(dataclasses.replace(member, layers=(0, 9)) for member in ring.members)
    cluster.verified(rings=(dataclasses.replace(ring, strategy="tensor", members=whole),))
    for members in (ring.members, ()):
        rings = (dataclasses.replace(ring, strategy="tensor", members=members),)
        assert refused_alike(cluster, rings=rings) == "ROSTER_RINGS"


def test_ranks_rings_and_places(cluster: Any, make_cluster: Callable[..., Any]) -> None:
    ring = complete_roster(cluster.draft).rings[0]
    first, second, third = ring.members

    def with_members(*members: RingMember) -> str:
        return refused_alike(cluster, rings=(dataclasses.replace(ring, members=members),))

    assert with_members() == "ROSTER_RINGS"
    assert with_members(second, first, third) == "ROSTER_RINGS"
    assert with_members(first, dataclasses.replace(second, rank=0), third) == "ROSTER_RINGS"
    assert with_members(first, dataclasses.replace(second, rank=3), third) == "ROSTER_RINGS"
    assert with_members(first, dataclasses.replace(second, id=first.id), third) == "ROSTER_RINGS"
    stranger = member_id(SoftwareSigner.generate().public_key)
    assert with_members(first, second, dataclasses.replace(third, id=stranger)) == "ROSTER_RINGS"
    twice = (ring, dataclasses.replace(ring, id="ring-1", replica=1))
    assert refused_alike(cluster, rings=twice) == "ROSTER_RINGS"
    assert refused_alike(cluster, rings=(ring, ring)) == "ROSTER_RINGS"
    each = [dataclasses.replace(ring, id=f"small-{number}", deployment=f"{number}") for number in range(9)]
    assert cluster.verified(rings=tuple(each[:8])).rings_of(first.id) == tuple(each[:8])
    assert refused_alike(cluster, rings=tuple(each)) == "ROSTER_RINGS"


def test_a_replica_has_one_ring(cluster: Any) -> None:
    ring = complete_roster(cluster.draft).rings[0]
    one = dataclasses.replace(ring, total_layers=3, members=ring.members[:1])
    two = dataclasses.replace(
        ring,
        id="ring-1",
        total_layers=6,
        members=tuple(
            dataclasses.replace(member, rank=rank, layers=(3 * rank, 3 * rank + 3))
            for rank, member in enumerate(ring.members[1:])
        ),
    )
    assert refused_alike(cluster, rings=(one, two)) == "ROSTER_RINGS"
    two = dataclasses.replace(two, replica=1)
    cluster.verified(rings=(one, two))
    assert refused_alike(cluster, rings=(two, one)) == "ROSTER_RINGS"
    assert refused_alike(cluster, rings=(one, dataclasses.replace(two, id="demo-0"))) == "ROSTER_RINGS"


def test_inflated_trust(cluster: Any) -> None:
    draft = complete_roster(cluster.draft)
    first, *rest = draft.members
    for changes in (
        {"trust": 11},
        {"trust": 20, "level": TrustLevel.SELF_SIGNED},
        {"trust": 30, "level": TrustLevel.HARDWARE},
    ):
        members = (dataclasses.replace(first, **changes), *rest)
        assert refused_alike(cluster, members=members) == "ROSTER_TRUST"
    enclave = dataclasses.replace(
        first, key_type=KeyType.SECURE_ENCLAVE, level=TrustLevel.SELF_SIGNED, trust=30
    )
    assert refused_alike(cluster, members=(enclave, *rest)) == "ROSTER_TRUST"
    cluster.verified(members=(dataclasses.replace(enclave, trust=20), *rest))


@pytest.mark.parametrize("field", ["min_trust", "trust_floor"])
def test_minima_are_recomputed_and_floors_hold(cluster: Any, field: str) -> None:
    assert refused_alike(cluster, **{field: 20}) == "ROSTER_TRUST"
    ring = dataclasses.replace(complete_roster(cluster.draft).rings[0], **{field: 20})
    assert refused_alike(cluster, rings=(ring,)) == "ROSTER_TRUST"
    if field == "min_trust":
        assert refused_alike(cluster, min_trust=0) == "ROSTER_TRUST"


def test_nobody_without_trust_serves(cluster: Any) -> None:
    first, *rest = complete_roster(cluster.draft).members
    none = dataclasses.replace(first, level=TrustLevel.NONE, trust=0)
    ring = dataclasses.replace(complete_roster(cluster.draft).rings[0], min_trust=0, trust_floor=0)
    changes = {"members": (none, *rest), "rings": (ring,), "min_trust": 0, "trust_floor": 0}
    assert refused_alike(cluster, **changes) == "ROSTER_TRUST"
    idle = cluster.verified(members=(none, *rest), rings=())
    assert idle.min_trust == 0


def test_stale_evidence_lowers_trust_below_its_level(cluster: Any) -> None:
    first, *rest = complete_roster(cluster.draft).members
    stale = dataclasses.replace(first, trust=0)
    ring = dataclasses.replace(cluster.draft.rings[0], trust_floor=0)
    roster = cluster.verified(members=(stale, *rest), rings=(ring,), trust_floor=0)
    assert roster.min_trust == roster.rings[0].min_trust == 0


@pytest.mark.parametrize(("issued", "expires"), [(NOW, NOW), (NOW, NOW - 1), (NOW, NOW + 901)])
def test_lifetime(cluster: Any, issued: int, expires: int) -> None:
    assert refused_alike(cluster, issued=issued, expires=expires) == "ROSTER_LIFETIME"


def edit(cluster: Any, change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(payload(cluster))
    change(document)
    return canonical_json(document)


MALFORMED: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(extra=1),
    lambda d: d.pop("rings"),
    lambda d: d.update(version=True),
    lambda d: d.update(version=0),
    lambda d: d.update(version="1"),
    lambda d: d.update(version=-1),
    lambda d: d.update(root_version=0),
    lambda d: d.update(previous="AAAA"),
    lambda d: d.update(previous=None),
    lambda d: d.update(previous=d["previous"].rstrip("=")),
    lambda d: d.update(members={}),
    lambda d: d.update(members=None),
    lambda d: d.update(suites=[]),
    lambda d: d.update(suites=["rot13"]),
    lambda d: d.update(suites=["x25519-aes256gcm"] * 2),
    lambda d: d.update(suites=[1]),
    lambda d: d.update(trust_floor=31),
    lambda d: d.update(cluster=""),
    lambda d: d["members"][0].update(extra=1),
    lambda d: d["members"][0].pop("manifest_hash"),
    lambda d: d["members"][0].update(manifest_hash=None),
    lambda d: d["members"][0].update(manifest_hash=""),
    lambda d: d["members"][0].update(attestation_hash=""),
    lambda d: d["members"][0].update(key_type="cloud"),
    lambda d: d["members"][0].update(sealing_key="AAAA"),
    lambda d: d["members"][0].update(addresses="127.0.0.1:1"),
    *(
        lambda d, address=address: d["members"][0].update(addresses=[address])
        for address in (
            "h" * 255 + ":65535",
            "h:0",
            "h:65536",
            "h:0000000080",
            "h:+12",
            "h: 12",
            "h:1_2",
            "h:\u0661",
            "h:",
        )
    ),
    *(
        lambda d, address=address: d["members"][0].update(addresses=[address])
        for address in (":12", "12", "127.0.0.1")
    ),
    lambda d: d["members"][0].update(addresses=["a:1"] * 9),
    lambda d: d["members"][0].update(id="a\x00b"),
    lambda d: d["members"].append("x"),
    lambda d: d["rings"][0].update(strategy="magic"),
    lambda d: d["rings"][0].update(id="Ring 0"),
    lambda d: d["rings"][0].update(context=0),
    lambda d: d["rings"][0].update(context=(1 << 24) + 1),
    lambda d: d["rings"][0].update(replica=1001),
    lambda d: d["rings"][0].update(total_layers=10001),
    lambda d: d["rings"][0].update(total_layers=0),
    lambda d: d["rings"][0].update(model_digest=""),
    lambda d: d["rings"][0]["members"][0].update(layers=[0]),
    lambda d: d["rings"][0]["members"][0].update(layers=[0, 3, 6]),
    lambda d: d["rings"][0]["members"][0].update(layers=[0, True]),
    lambda d: d["rings"][0]["members"][0].update(rank=None),
    lambda d: d["gateways"][0].update(at=1),
    lambda d: d["gateways"][0].update(identity_key="AAAA"),
    lambda d: d["revoked"].append({"id": "x"}),
]


@pytest.mark.parametrize("index", range(len(MALFORMED)))
def test_malformed_payloads(cluster: Any, index: int) -> None:
    assert refusal(cluster, edit(cluster, MALFORMED[index])) == "ROSTER_MALFORMED"


@pytest.mark.parametrize(
    "change",
    [
        {"type": "root"},
        {"type": None},
        {"spec_version": 2},
        {"spec_version": True},
        {"spec_version": "1"},
    ],
)
def test_type_and_specification(cluster: Any, change: dict[str, Any]) -> None:
    assert refusal(cluster, edit(cluster, lambda d: d.update(change))) == "ROSTER_TYPE"


def test_unknown_level_is_refused_as_trust(cluster: Any) -> None:
    changed = edit(cluster, lambda d: d["members"][0].update(level="golden"))
    assert refusal(cluster, changed) == "ROSTER_TRUST"


def test_duplicate_fields_floats_and_nan(cluster: Any) -> None:
    text = payload(cluster)
    for broken in (
        text.replace(b'"version":1}', b'"version":1,"version":1}'),
        text[:-1] + b',"version":2}',
        text.replace(b'"trust_floor":10', b'"trust_floor":10.0', 1),
        text.replace(b'"trust_floor":10', b'"trust_floor":NaN', 1),
        text.replace(b'"trust_floor":10', b'"trust_floor":1e1', 1),
        text.replace(b'"trust_floor":10', b'"trust_floor":99999999999999999999999', 1),
        text + b"x",
        b"\xef\xbb\xbf" + text,
        text[:-1],
        b"[" * 5000,
        b"[]",
        b"\xff",
    ):
        assert broken != text
        assert refusal(cluster, broken) == "ROSTER_MALFORMED"


def test_other_whitespace_is_another_roster_with_another_hash(cluster: Any) -> None:
    """Equal JSON re-encoded is verified over its own bytes: never mistaken for the original."""
    text = payload(cluster)
    spaced = json.dumps(json.loads(text), indent=1).encode()
    assert read(cluster, spaced).hash != read(cluster, text).hash
    envelope = parse_envelope(cluster.sign(), payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
    forged = dataclasses.replace(envelope, payload=spaced)
    with refused("BAD_SIGNATURE", RosterError):
        check_roster(encode_envelope(forged), cluster.authority.root, now=NOW)


def test_size_cap(cluster: Any, make_cluster: Callable[..., Any]) -> None:
    assert (size_cap(0), size_cap(99), size_cap(100)) == (65536, 65536, 131072)
    text = payload(cluster)
    padded = text[:-1] + b" " * (size_cap(3) - len(text)) + b"}"
    assert len(padded) == size_cap(3)
    read(cluster, padded)
    assert refusal(cluster, padded[:-1] + b" }") == "ROSTER_TOO_LARGE"
    huge = sign_envelope(PAYLOAD_TYPE, bytes(MAX_PAYLOAD_BYTES + 1), cluster.authority.roster_signers)
    with refused("ENVELOPE_MALFORMED", RosterError):
        check_roster(huge, cluster.authority.root, now=NOW)


def revoked_strangers(count: int) -> tuple[Revoked, ...]:
    keys = [SoftwareSigner.generate().public_key for _ in range(count)]
    return tuple(sorted((Revoked(member_id(key), key, 1, 2) for key in keys), key=lambda one: one.id))


def test_too_much_for_the_cap_is_not_signed(cluster: Any) -> None:
    """The largest that fits is found by adding; it fills the cap, and a reader takes it."""

    def roster(revoked: tuple[Revoked, ...], model: int) -> Roster:
        rings = tuple(dataclasses.replace(ring, model="m" * model) for ring in cluster.draft.rings)
        return complete_roster(dataclasses.replace(cluster.draft, revoked=revoked, rings=rings))

    revoked = revoked_strangers(420)
    assert not fits(roster(revoked, 1))
    while not fits(roster(revoked, 1)):
        revoked = revoked[:-1]
    room = bisect.bisect_left(range(256), True, key=lambda size: not fits(roster(revoked, size))) - 1
    full = encode_roster(roster(revoked, room))
    assert len(full) == size_cap(3)
    assert read(cluster, full).rings[0].model == "m" * room
    with refused("ROSTER_TOO_LARGE", RosterError):
        encode_roster(roster(revoked, room + 1))


@SHARED
@given(data=st.data())
def test_changing_any_byte_is_refused_or_is_another_roster(cluster: Any, data: st.DataObject) -> None:
    """A changed payload never crashes the parser, and never parses to the original."""
    text = payload(cluster)
    position = data.draw(st.integers(0, 1 << 20)) % len(text)
    changed = text[:position] + bytes([data.draw(st.integers(0, 255))]) + text[position + 1 :]
    try:
        roster = read(cluster, changed)
    except RosterError:
        return
    assert (roster.hash == cluster.verified().hash) == (changed == text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@SHARED
@given(
    field=st.sampled_from(sorted({"cluster", "version", "members", "rings", "suites", "gateways"})),
    value=json_values,
)
def test_any_json_in_any_field_is_refused_cleanly(cluster: Any, field: str, value: Any) -> None:
    try:
        parse_roster(edit(cluster, lambda d: d.update({field: value})))
    except RosterError:
        pass


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["rings"][0].update(context=1 << 24, replica=1000),
        lambda d: (
            d["rings"][0]["members"][2].update(layers=[6, 10000]),
            d["rings"][0].update(total_layers=10000),
        ),
        lambda d: d["members"][0].update(addresses=["a:1", "[::1]:65535"] * 4),
        lambda d: d.update(cluster="demo", expires=NOW + 900),
        lambda d: d.update(cluster="demo", expires=NOW + 1),
    ],
)
def test_values_at_their_bounds_are_taken(cluster: Any, change: Callable[[dict[str, Any]], object]) -> None:
    read(cluster, edit(cluster, change))


def test_the_smallest_ring_is_a_ring(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(1)
    ring = cluster.draft.rings[0]
    tiny = dataclasses.replace(
        ring, context=1, total_layers=1, members=(dataclasses.replace(ring.members[0], layers=(0, 1)),)
    )
    assert cluster.verified(rings=(tiny,)).rings[0].total_layers == 1
    for changes in ({"context": 0}, {"total_layers": 0}):
        assert refusal(cluster, payload(cluster, rings=(dataclasses.replace(tiny, **changes),)))


@pytest.mark.parametrize("address", ["h" * 254 + ":65535", "h:1"])
def test_addresses_at_their_bounds(cluster: Any, address: str) -> None:
    first, *rest = complete_roster(cluster.draft).members
    changed = payload(cluster, members=(dataclasses.replace(first, addresses=(address,)), *rest))
    assert read(cluster, changed).members[0].addresses == (address,)


def test_gateways_and_addresses_are_counted(cluster: Any) -> None:
    gateways = tuple(Gateway(one.id, one.identity_key) for one in revoked_strangers(101))
    assert len(read(cluster, payload(cluster, gateways=gateways[:100])).gateways) == 100
    assert refusal(cluster, payload(cluster, gateways=gateways)) == "ROSTER_MALFORMED"


def test_evidence_may_be_ahead_by_the_skew_and_no_more(cluster: Any) -> None:
    first, *rest = complete_roster(cluster.draft).members
    for name in ("attested_at", "challenged_at"):
        for ahead, sound in ((60, True), (61, False)):
            changed = (dataclasses.replace(first, **{name: NOW + ahead}), *rest)
            if sound:
                read(cluster, payload(cluster, members=changed))
            else:
                assert refusal(cluster, payload(cluster, members=changed)) == "ROSTER_MEMBERS"


@pytest.mark.parametrize(
    ("field", "most"),
    [("members", 1000), ("rings", 1000), ("gateways", 100), ("revoked", 1000), ("coordinators", 5)],
)
def test_no_list_is_longer_than_its_bound(cluster: Any, field: str, most: int) -> None:
    """What is in it is looked at only where there is not too much of it."""
    for count in (most, most + 1):
        with pytest.raises(RosterError) as error:
            parse_roster(edit(cluster, lambda d, count=count: d.update({field: [0] * count})))  # type: ignore[misc]
        counted = f"field {field} is not a list of the right length" in error.value.message
        assert counted == (count > most)
