"""What is found about an enrolled node: whom it reaches, its certificate, clock, trust and planned model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from appletest import GOOD
from doctortest import FakeSystem, by_id

from sealring.doctor import certificates, clocks, daemon, reach, storage, trust
from sealring.doctor.report import Severity, TriedConnection
from sealring.doctor.view import View
from sealring.mesh.crypto import DEFAULT_SUITES, KeyType
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, RootMetadata, expires_at
from sealring.mesh.roster import Ring, RingMember, Roster, RosterMember
from sealring.mesh.trust.levels import TrustLevel

DAY = 86400
NOW = 1_800_000_000
DIGEST = bytes(range(32))


def member(name: str, address: str, **fields: Any) -> RosterMember:
    known: dict[str, Any] = {
        "id": name,
        "identity_key": b"",
        "key_type": KeyType.SOFTWARE,
        "sealing_key": b"",
        "level": TrustLevel.SOFTWARE,
        "trust": 10,
        "attestation_hash": b"",
        "enrolled": 1,
        "attested_at": NOW,
        "challenged_at": NOW,
        "manifest_hash": b"",
        "addresses": (address,),
    }
    return RosterMember(**(known | fields))


def roster(*members: RosterMember, **fields: Any) -> Roster:
    ring = Ring(
        "demo-0", "demo", 0, "tiny", DIGEST, "pipeline", 512, 9, b"", 0, 0, (RingMember("me", 0, (0, 9)),)
    )
    known: dict[str, Any] = {
        "cluster": "testbed",
        "root_version": 1,
        "version": 1,
        "previous": b"",
        "issued": NOW,
        "expires": NOW + 600,
        "suites": DEFAULT_SUITES,
        "trust_floor": 0,
        "min_trust": 0,
        "members": members,
        "rings": (ring,),
    }
    return Roster(**(known | fields))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> ClusterCA:
    return ClusterCA.create(tmp_path_factory.mktemp("authority"), "testbed", now=NOW)


@pytest.fixture
def enrolled(view: View, authority: ClusterCA) -> View:
    """A node with a daemon that reaches its one peer."""
    peer = PeerIdentity("testbed", Role.MEMBER, "me")
    certificate = authority.issue(LeafKey().csr(), peer, lifetime=DAY, now=NOW, addresses=("10.0.0.1",))
    state: Any = SimpleNamespace(
        peer=peer,
        name="mini",
        join="10.0.0.9:7701",
        coordinator="10.0.0.9:7700",
        root=RootMetadata("testbed", 1, (), 1, (), 1, (authority.certificate,), NOW, NOW + 3600 * DAY),
        tls=SimpleNamespace(certificate=certificate),
    )
    settings = view.settings.model_copy(update={"ring_host": "10.0.0.1"})
    return replace(
        view,
        settings=settings,
        state=state,
        roster=roster(member("me", "10.0.0.1:7710"), member("other", "10.0.0.2:7710")),
        connections=(TriedConnection(member="other", address="10.0.0.2:7710"),),
        session=True,
    )


def test_where_a_daemon_is_asked(enrolled: View) -> None:
    def addresses(listen: str) -> list[str]:
        settings = enrolled.settings.model_copy(update={"listen": listen})
        return daemon.addresses_to_ask(replace(enrolled, settings=settings))

    assert addresses("10.0.0.1:7710") == ["10.0.0.1:7710"]
    assert addresses("0.0.0.0:7712") == ["127.0.0.1:7712", "10.0.0.1:7710"]
    assert addresses("[::]:7712") == ["[::1]:7712", "10.0.0.1:7710"]
    assert addresses("10.0.0.1:0") == ["10.0.0.1:7710"]
    assert enrolled.roster is not None
    many = member("me", "10.0.0.1:1", addresses=tuple(f"10.0.0.1:{port}" for port in range(1, 5)))
    enrolled = replace(enrolled, roster=replace(enrolled.roster, members=(many,)))
    assert addresses("10.0.0.2:7") == ["10.0.0.2:7", "10.0.0.1:1", "10.0.0.1:2"]


def test_a_view_without_an_enrolment_or_a_roster_is_of_no_member(enrolled: View) -> None:
    assert enrolled.member is not None
    assert (enrolled.member.id, len(enrolled.rings)) == ("me", 1)
    assert enrolled.addresses == ("10.0.0.1:7710",)
    for view in (replace(enrolled, state=None), replace(enrolled, roster=None)):
        assert (view.member, view.rings, view.addresses) == (None, (), ("127.0.0.1:7710",))


def mac(**options: Any) -> FakeSystem:
    return FakeSystem(now=NOW, **options)


def failing(view: View, *errors: str) -> View:
    made = tuple(
        TriedConnection(member="other", address=f"10.0.0.{number}:7710", error=error)
        for number, error in enumerate(errors, 2)
    )
    return replace(view, connections=made)


def test_a_good_node(enrolled: View) -> None:
    for check in (reach.check, certificates.check, clocks.check):
        assert {one.severity for one in check(mac(), enrolled)} == {Severity.OK}


@pytest.mark.parametrize(
    ("errors", "platform", "identifier", "severity"),
    [
        (["EHOSTUNREACH", "EHOSTUNREACH"], "darwin", "reach.local_network", Severity.PROBLEM),
        (["EHOSTUNREACH", "EHOSTUNREACH"], "linux", "reach.peers", Severity.PROBLEM),
        (["EHOSTUNREACH", ""], "darwin", "reach.peers", Severity.WARNING),
        (["ECONNREFUSED"], "darwin", "reach.peers", Severity.PROBLEM),
        (["TIMEOUT", ""], "darwin", "reach.peers", Severity.WARNING),
    ],
)
def test_peers(enrolled: View, errors: list[str], platform: str, identifier: str, severity: Severity) -> None:
    found = by_id(reach.check(mac(platform=platform), failing(enrolled, *errors)))
    assert found[identifier].severity is severity
    if identifier == "reach.local_network":
        assert "errno 65" in found[identifier].what
        assert found[identifier].command == "sudo sealring service install node"


def test_what_peers_are_there_and_were_tried(enrolled: View) -> None:
    def said(**known: Any) -> list[str]:
        found = reach.check(mac(), replace(enrolled, **known))
        return [one.what for one in found if one.id == "reach.peers"]

    three = tuple(TriedConnection(member="x", address=f"10.0.0.{one}:1") for one in range(3))
    assert said(connections=()) == ["the roster has no other member to reach"]
    assert said(connections=three) == ["the daemon reaches all 3 addresses of its peers"]
    assert said(connections=three, left_out=2)[0] == "2 addresses of peers were not tried"
    many = tuple(TriedConnection(member="x", address=f"h:{one}", error="TIMEOUT") for one in range(9))
    shown = ", ".join(f"h:{one} TIMEOUT" for one in range(8))
    assert said(connections=many) == [f"the daemon does not reach 9 of 9 addresses of its peers: {shown}"]


@pytest.mark.parametrize(
    ("address", "error", "identifier"),
    [
        ("127.0.0.1:1", "EHOSTUNREACH", "reach.peers"),
        ("10.0.0.2:1", "EHOSTUNREACH", "reach.local_network"),
        ("no address", "EHOSTUNREACH", "reach.local_network"),
    ],
)
def test_access_is_denied_where_something_leaves_the_machine(
    enrolled: View, address: str, error: str, identifier: str
) -> None:
    view = replace(enrolled, connections=(TriedConnection(member="x", address=address, error=error),))
    assert by_id(reach.check(mac(), view))[identifier].severity is Severity.PROBLEM


@pytest.mark.parametrize(
    ("session", "severity"), [(False, Severity.PROBLEM), (True, Severity.OK), (None, None)]
)
def test_a_daemon_and_its_coordinator(enrolled: View, session: bool | None, severity: Severity) -> None:
    found = by_id(reach.check(mac(), replace(enrolled, session=session))).get("reach.coordinator")
    assert (found and found.severity) is severity
    assert severity is not Severity.PROBLEM or "it tries 10.0.0.9:7700, and asks" in found.why


def test_a_daemon_that_does_not_answer(enrolled: View) -> None:
    found = by_id(reach.check(mac(), replace(enrolled, connections=None, session=None)))
    assert found["daemon.answers"].severity is Severity.WARNING
    assert found["daemon.answers"].command == "sealring join"
    assert "ports.listen" in found
    found = by_id(reach.check(mac(service=True), replace(enrolled, connections=None, session=None)))
    assert found["daemon.answers"].command == "sudo sealring service start node"


@pytest.mark.parametrize(
    ("own", "ring_host", "other", "expected"),
    [
        ("127.0.0.1:7710", "127.0.0.1", "10.0.0.2:7710", {"reach.address", "reach.ring_host"}),
        ("127.0.0.1:7710", "10.0.0.1", "10.0.0.2:7710", {"reach.address"}),
        ("10.0.0.1:7710", "127.0.0.1", "10.0.0.2:7710", {"reach.ring_host"}),
        ("10.0.0.1:7710", "10.0.0.1", "10.0.0.2:7710", set()),
        ("127.0.0.1:7710", "127.0.0.1", "127.0.0.1:7711", set()),
        (None, "127.0.0.1", "", set()),
    ],
)
def test_addresses_that_only_this_machine_reaches(
    enrolled: View, own: str | None, ring_host: str, other: str, expected: set[str]
) -> None:
    near = roster(member("me", own), member("other", other)) if own else None
    settings = enrolled.settings.model_copy(update={"ring_host": ring_host})
    found = by_id(reach.check(mac(), replace(enrolled, roster=near, settings=settings)))
    wrong = {one for one, finding in found.items() if finding.severity is Severity.PROBLEM}
    assert {"reach.address", "reach.ring_host"} & wrong == expected


@pytest.mark.parametrize(
    ("after", "session", "severity"),
    [
        (-61, True, Severity.PROBLEM),
        (-61, False, Severity.PROBLEM),
        (-60, True, Severity.OK),
        (0, True, Severity.OK),
        (600, True, Severity.OK),
        (601, True, Severity.OK),
        (DAY / 2 + 3600, True, Severity.OK),
        (DAY / 2 + 3600.5, True, Severity.WARNING),
        (DAY * 0.9, True, Severity.WARNING),
        (DAY * 0.9, False, Severity.OK),
        (DAY - 1, False, Severity.OK),
        (DAY, True, Severity.PROBLEM),
        (2 * DAY, True, Severity.PROBLEM),
    ],
)
def test_certificate(enrolled: View, after: float, session: bool, severity: Severity) -> None:
    found = by_id(certificates.check(FakeSystem(now=NOW + after), replace(enrolled, session=session)))
    assert found["certificate.life"].severity is severity
    assert ("certificate.roster" in found) == (session and after > 600)


@pytest.mark.parametrize(
    ("left", "shown"),
    [(59, "1 min"), (3599, "60 min"), (3600, "1.0 h"), (2 * DAY - 1, "48.0 h"), (2 * DAY, "2 days")],
)
def test_durations(enrolled: View, left: int, shown: str) -> None:
    assert enrolled.state is not None
    found = by_id(certificates.check(FakeSystem(now=enrolled.state.root.ends - left), enrolled))
    assert found["certificate.root"].what.endswith(f" ends in {shown}")


@pytest.mark.parametrize(
    ("left", "severity"),
    [
        (400 * DAY, Severity.OK),
        (300 * DAY, Severity.WARNING),
        (1, Severity.WARNING),
        (0, Severity.PROBLEM),
        (-DAY, Severity.PROBLEM),
    ],
)
@pytest.mark.parametrize("authority_first", [False, True])
def test_root_metadata(enrolled: View, left: int, severity: Severity, authority_first: bool) -> None:
    assert enrolled.state is not None
    root = enrolled.state.root
    ends = expires_at(root.authorities[0]) if authority_first else root.expires
    changed = replace(root, expires=int(ends + DAY if authority_first else ends))
    state: Any = SimpleNamespace(**vars(enrolled.state) | {"root": changed})
    found = by_id(certificates.check(FakeSystem(now=ends - left), replace(enrolled, state=state)))
    assert found["certificate.root"].severity is severity


@pytest.mark.parametrize(("before", "severity"), [(60, Severity.OK), (61, Severity.PROBLEM)])
def test_root_metadata_from_the_future(enrolled: View, before: int, severity: Severity) -> None:
    assert enrolled.state is not None
    now = enrolled.state.root.issued - before
    found = by_id(certificates.check(FakeSystem(now=now), enrolled))
    assert found["certificate.root"].severity is severity


@pytest.mark.parametrize(
    ("now", "session", "severity"),
    [
        (NOW, True, Severity.OK),
        (NOW - 60, True, Severity.OK),
        (NOW - 61, True, Severity.PROBLEM),
        (NOW + 660, True, Severity.OK),
        (NOW + 661, True, Severity.PROBLEM),
        (NOW + 661, False, Severity.OK),
    ],
)
def test_clock(enrolled: View, now: float, session: bool, severity: Severity) -> None:
    view = replace(enrolled, session=session)
    assert by_id(clocks.check(FakeSystem(now=now), view))["clock.offset"].severity is severity


@pytest.mark.parametrize(
    ("fields", "session", "wanted"),
    [
        ({"trust": 10, "challenged_at": NOW - 900}, True, {"trust.level": Severity.OK}),
        ({"trust": 9, "challenged_at": NOW - 900}, True, {"trust.level": Severity.WARNING}),
        (
            {"trust": 10, "challenged_at": NOW - 901},
            True,
            {"trust.level": Severity.OK, "trust.challenge": Severity.WARNING},
        ),
        ({"trust": 10, "challenged_at": NOW - 901}, False, {"trust.level": Severity.OK}),
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_trust_its_age_and_the_floor(
    enrolled: View, fields: dict[str, int], session: bool, wanted: dict[str, Severity], below: bool
) -> None:
    known = roster(member("me", "10.0.0.1:7710", **fields), trust_floor=fields["trust"] + below)
    found = by_id(trust.check(mac(platform="linux"), replace(enrolled, roster=known, session=session)))
    floor = {"trust.floor": Severity.PROBLEM} if below else {}
    assert {one: found[one].severity for one in found} == {"trust.possible": Severity.NOTE, **wanted, **floor}


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (TrustLevel.SOFTWARE, Severity.NOTE),
        (TrustLevel.SELF_SIGNED, Severity.OK),
        (TrustLevel.HARDWARE, Severity.OK),
    ],
)
def test_a_mac_whose_protections_are_on_may_have_a_better_level(
    enrolled: View, level: TrustLevel, severity: Severity
) -> None:
    known = roster(member("me", "10.0.0.1:7710", level=level, trust=90))
    found = by_id(trust.check(mac(posture=GOOD), replace(enrolled, roster=known)))
    assert found["trust.possible"].severity is severity


@pytest.mark.parametrize(
    ("answer", "downloads", "severity", "words"),
    [
        ({"result": {"digest": DIGEST.hex()}}, False, Severity.OK, "is the model planned"),
        ({"result": {"digest": "00" * 32}}, False, Severity.PROBLEM, "another model"),
        ({"problem": {}}, False, Severity.NOTE, "could not tell"),
        (None, False, Severity.PROBLEM, "is not here"),
        (None, True, Severity.NOTE, "would be downloaded"),
    ],
)
def test_the_planned_model(
    enrolled: View, tmp_path: Path, answer: Any, downloads: bool, severity: Severity, words: str
) -> None:
    if answer is not None:
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "config.json").touch()
    settings = enrolled.settings.model_copy(update={"models": [tmp_path], "allow_downloads": downloads})
    system = mac(says={"python -P -m sealring.node.engine.profile": json.dumps(answer)})
    found = by_id(storage.check(system, replace(enrolled, settings=settings)))["models.planned"]
    assert found.severity is severity
    assert words in found.what
    if answer == {"result": {"digest": "00" * 32}}:
        assert found.what.endswith(f"({'0' * 16}, planned {DIGEST.hex()[:16]})")
    elif severity is Severity.OK:
        assert found.what.endswith(f"({DIGEST.hex()[:16]})")


def test_a_planned_model_that_the_node_has_fetched_is_here(enrolled: View, tmp_path: Path) -> None:
    fetched = tmp_path / "models" / "tiny"
    fetched.mkdir(parents=True)
    (fetched / "config.json").touch()
    settings = enrolled.settings.model_copy(update={"state_dir": tmp_path, "allow_downloads": True})
    says = {"python -P -m sealring.node.engine.profile": json.dumps({"result": {"digest": DIGEST.hex()}})}
    found = by_id(storage.check(mac(says=says), replace(enrolled, settings=settings)))["models.planned"]
    assert found.severity is Severity.OK


async def test_where_no_daemon_can_be_asked_the_view_stays(enrolled: View) -> None:
    view = replace(enrolled, state=None)
    assert await daemon.ask_daemon(view) is view
