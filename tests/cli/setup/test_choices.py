"""What `sealring up` and `sealring join` choose: what was said, what was before, what can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import FakeHost

from sealring.cli.here.settings_files import PORTS
from sealring.cli.local.machines import FirstMachine, OtherMachine
from sealring.cli.setup.choices import (
    PROXY_PORT,
    Choices,
    Wishes,
    choose_first,
    choose_other,
    choose_proxy,
)
from sealring.coordinator.settings import CoordinatorSettings
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.errors import ConfigError, InvalidInput, PermissionDenied
from sealring.mesh.member import IDENTITY_KEY
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.networks import OwnAddress
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.identity.choice import IdentityChoice
from sealring.node.settings import NodeSettings

LOOPBACK, ELSEWHERE = "127.0.0.1", "10.254.254.254"
HERE = Wishes(address=LOOPBACK)
HELPER = Path("/bin/sh")
COORDINATORS = ["10.0.0.1:7701"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all state. No settings are in the environment."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def first(host: FakeHost, root: Path, wishes: Wishes = HERE, settings: str = "") -> Choices:
    """What a first machine chooses, and keeps for the next time."""
    file = root.with_suffix(".toml") if settings else None
    if file is not None:
        file.write_text(settings)
    made = choose_first(host, root, file, wishes)
    FirstMachine(root, made.settings).write_configs()
    return made


def other(host: FakeHost, root: Path, wishes: Wishes = HERE, said: Any = None, **how: Any) -> dict[str, Any]:
    """What another machine's node is set to, which it keeps for the next time."""
    made = choose_other(host, root, said or {}, wishes, COORDINATORS, **how)
    OtherMachine(root, made.settings).write_configs()
    (node,) = made.settings.values()
    return node


def was_at(root: Path, component: str, address: str) -> None:
    """Has the component believe that it was at another address before."""
    file = root / "config" / f"{component}.toml"
    file.write_text(file.read_text().replace(f"{LOOPBACK}:", f"{address}:"))


def test_everything_listens_at_the_address_that_was_named_at_the_usual_ports(
    host: FakeHost, root: Path
) -> None:
    made = first(host, root).settings
    assert (made["coordinator"]["listen"], made["coordinator"]["join_listen"]) == (
        f"{LOOPBACK}:7700",
        f"{LOOPBACK}:7701",
    )
    assert (made["node"]["listen"], made["node"]["ring_host"]) == (f"{LOOPBACK}:7710", LOOPBACK)
    assert (made["gateway"]["grpc_listen"], made["gateway"]["http_listen"]) == (
        f"{LOOPBACK}:7780",
        f"{LOOPBACK}:8080",
    )
    assert made["node"]["allow_downloads"] is True
    assert made["coordinator"]["state_dir"] == str(root / "coordinator")


def test_a_port_that_is_taken_is_passed_over_and_what_was_chosen_stays(host: FakeHost, root: Path) -> None:
    host.ports.add(8080)
    made = first(host, root).settings
    assert made["gateway"]["http_listen"] != f"{LOOPBACK}:8080"
    host.ports.clear()
    again = first(host, root, Wishes()).settings
    assert again == made, "the address as well, though loopback is none that others reach"


def test_the_users_settings_stand(host: FakeHost, root: Path) -> None:
    settings = f"""
[coordinator]
listen = "{LOOPBACK}:7"
roster_lifetime = 60
[node]
name = "attic"
allow_downloads = false
"""
    made = first(host, root, settings=settings).settings
    assert (made["coordinator"]["listen"], made["coordinator"]["roster_lifetime"]) == (f"{LOOPBACK}:7", 60)
    assert (made["node"]["name"], made["node"]["allow_downloads"]) == ("attic", False)
    wishes = Wishes(LOOPBACK, "cellar", [Path("two"), Path("/three")], downloads=True)
    named = first(host, root, wishes, settings).settings["node"]
    assert (named["name"], named["allow_downloads"]) == ("cellar", True)
    assert named["models"] == [str(root.parent / "two"), "/three"]


def test_the_coordinator_is_reached_at_every_address_and_nobody_is_asked_for_one(
    host: FakeHost, root: Path
) -> None:
    host.addresses = [OwnAddress(LOOPBACK, "en0"), OwnAddress("10.9.9.9", "bridge0")]
    made = first(host, root, Wishes()).settings
    assert (made["coordinator"]["listen"], made["coordinator"]["join_listen"]) == (
        "0.0.0.0:7700",
        "0.0.0.0:7701",
    )
    assert made["node"]["listen"].startswith(f"{LOOPBACK}:"), "the first"
    host.addresses = [OwnAddress("10.9.9.9", "bridge0")]
    assert first(host, root, Wishes()).settings["coordinator"] == made["coordinator"], "another time too"


@pytest.mark.parametrize(
    ("wished", "found", "before", "lines"),
    [
        (LOOPBACK, [], None, ["named"]),
        (None, [], None, ["none"]),
        (None, [LOOPBACK], None, ["all"]),
        (None, [], LOOPBACK, ["named"]),
        (None, [LOOPBACK], LOOPBACK, ["named"]),
        (LOOPBACK, [], ELSEWHERE, ["before", "named"]),
        (None, [LOOPBACK], ELSEWHERE, ["before", "all"]),
        (None, [], ELSEWHERE, ["before", "none"]),
    ],
)
def test_it_is_said_where_this_machine_is_reached_and_where_it_was(
    host: FakeHost, root: Path, wished: str | None, found: list[str], before: str | None, lines: list[str]
) -> None:
    if before is not None:
        first(host, root)
        was_at(root, "coordinator", before)
    host.addresses = [OwnAddress(one, "en0") for one in found]
    made = first(host, root, Wishes(wished))
    said = {
        "before": f"address: it was {before}. The other machines look for this one on their network",
        "named": f"address: {LOOPBACK}, where only this machine reaches it (or --address)",
        "all": f"addresses: {LOOPBACK} (en0); other machines reach this one at any (--address for one)",
        "none": "addresses: none. Start `sealring up` again on a network, so that others can join",
    }
    assert [line for line in made.said if line.startswith("address")] == [said[one] for one in lines]
    assert made.settings["node"]["ring_host"] == LOOPBACK


@pytest.mark.parametrize("address", [ELSEWHERE, "0.0.0.0", "studio.local", "::1", "224.0.0.1"])
def test_an_address_that_is_not_this_machines_is_refused(host: FakeHost, root: Path, address: str) -> None:
    for choose in (first, other):
        with pytest.raises(InvalidInput) as error:
            choose(host, root, Wishes(address))
        assert error.value.reason == "BAD_ADDRESS"


def test_the_level_of_the_machine_decides_whom_it_takes(host: FakeHost, tmp_path: Path) -> None:
    """Unless somebody decides; and what was decided stays."""

    def allowed(name: str, wish: bool | None = None) -> tuple[bool, ...]:
        (tmp_path / name).mkdir(exist_ok=True)
        wishes = Wishes(LOOPBACK, software_identity_allowed=wish)
        made = first(host, tmp_path / name, wishes).settings
        return tuple(made[part]["software_identity_allowed"] for part in ("coordinator", "node"))

    assert allowed("soft") == (True, True)
    with pytest.raises(PermissionDenied) as error:
        allowed("soft", wish=False)
    assert error.value.reason == "SOFTWARE_IDENTITY"
    host.identity_found = IdentityChoice(TrustLevel.SELF_SIGNED, HELPER, "")
    assert allowed("enclave") == (False, False)
    assert allowed("enclave", wish=True) == (True, True)
    assert allowed("enclave")[0] is True
    assert allowed("enclave", wish=False) == (False, False)
    host.identity_found = IdentityChoice(TrustLevel.SOFTWARE, HELPER, "FileVault is off")
    assert allowed("poor") == (True, True)


def test_another_machine_takes_its_address_on_the_way_to_the_coordinator(host: FakeHost, root: Path) -> None:
    host.way = "10.0.0.2"
    node = other(host, root, Wishes(name="two"))
    assert (node["ring_host"], node["name"], node["listen"]) == ("10.0.0.2", "two", "10.0.0.2:7710")
    host.way, host.addresses = None, [OwnAddress("10.0.0.2", "en0")]
    assert other(host, root, Wishes()) == node, "where it was, if there is no way now"
    host.way = LOOPBACK
    assert other(host, root, Wishes())["ring_host"] == LOOPBACK, "the way there is now"
    said = {"listen": "10.0.0.2:1"}
    assert other(host, root, Wishes(), said)["listen"] == "10.0.0.2:1", "what the user's settings say"


def test_a_machine_that_has_joined_keeps_the_address_that_it_was_given(host: FakeHost, root: Path) -> None:
    """`join` begins anew without its options, and so does whoever types it again."""
    node = other(host, root)
    host.way = "10.0.0.2"
    assert other(host, root, Wishes(), joined=True) == node
    was_at(root, "node", ELSEWHERE)
    assert other(host, root, Wishes(), joined=True)["ring_host"] == "10.0.0.2", "which it has no more"


def test_a_nodes_port_stays_unless_others_have_taken_it(host: FakeHost, root: Path) -> None:
    file = root / "config" / "node.toml"
    file.parent.mkdir()
    file.write_text(f'[node]\nlisten = "{LOOPBACK}:4711"\n')
    assert other(host, root)["listen"] == f"{LOOPBACK}:4711"
    host.ports.add(4711)
    assert parse_address(other(host, root)["listen"]) == (LOOPBACK, 7710)


@pytest.mark.parametrize("listen", ["0.0.0.0:7", "[::1]:7", "studio.local:7", "127.0.0.1", "127.0.0.1:0"])
def test_settings_of_before_that_name_no_address_or_port_name_none(
    host: FakeHost, root: Path, listen: str
) -> None:
    (root / "config").mkdir()
    (root / "config" / "node.toml").write_text(f'[node]\nlisten = "{listen}"\n')
    if listen in ("0.0.0.0:7", "[::1]:7", "studio.local:7"):
        assert other(host, root)["listen"] == f"{LOOPBACK}:7", "the port is kept"
    else:
        assert other(host, root)["listen"] == f"{LOOPBACK}:7710"
    host.way = None
    (root / "config" / "node.toml").write_text('[node]\nlisten = "0.0.0.0:7"\n')
    with pytest.raises(ConfigError) as error:
        other(host, root, Wishes())
    assert error.value.reason == "NO_ADDRESS"


def test_each_choice_is_told_in_a_line(host: FakeHost, root: Path) -> None:
    taken = "(--software-identity-allowed and --no-software-identity-allowed)"
    host.identity_found = IdentityChoice(TrustLevel.SOFTWARE, None, "there is no helper")
    assert choose_first(host, root, None, HERE).said[1:] == [
        "identity: software: there is no helper",
        "models: those in the Hugging Face cache; any other is downloaded (--models, --downloads)",
        f"trust: machines with a key in a file can join too {taken}",
    ]
    host.identity_found = IdentityChoice(TrustLevel.SELF_SIGNED, HELPER, "")
    wishes = Wishes(LOOPBACK, models=[root, Path("/b")], downloads=False)
    assert choose_first(host, root, None, wishes).said[1:] == [
        "identity: self_signed",
        f"models: those in {root}, /b; no other is downloaded (--models, --downloads)",
        f"trust: only machines that claim a key in a Secure Enclave, or better, can join {taken}",
    ]


@pytest.mark.parametrize(("enrolled", "key"), [(True, True), (True, False), (False, True)])
def test_who_joined_with_a_key_in_a_file_keeps_it(
    host: FakeHost, root: Path, enrolled: bool, key: bool
) -> None:
    host.identity_found = IdentityChoice(TrustLevel.SELF_SIGNED, HELPER, "")
    (root / "node").mkdir()
    for name, there in (("member.json", enrolled), (IDENTITY_KEY, key)):
        if there:
            (root / "node" / name).write_text("{}")
    made = choose_first(host, root, None, HERE)
    kept = enrolled and key
    assert made.settings["node"].get("enclave_helper") == (None if kept else str(HELPER))
    assert ("identity: software: the key that it has joined with is in a file" in made.said) == kept
    named = first(host, root, settings=f'[node]\nenclave_helper = "{HELPER}"\n')
    assert named.settings["node"]["enclave_helper"] == str(HELPER)


def test_a_bad_name_is_one_clear_error(host: FakeHost, root: Path) -> None:
    with pytest.raises(ConfigError) as error:
        first(host, root, Wishes(LOOPBACK, name="Not A Name"))
    assert error.value.reason == "BAD_SETTING"


def test_a_standby_has_a_coordinator_and_a_gateway_where_programs_ask(host: FakeHost, root: Path) -> None:
    host.addresses = [OwnAddress(LOOPBACK, "en0")]
    made = choose_other(host, root, {}, Wishes(LOOPBACK), ["10.0.0.1:7700"], joined=True, proxy=8123).settings
    assert list(made) == ["coordinator", "gateway", "node"]
    assert made["coordinator"]["standby"] == "10.0.0.1:7700"
    assert made["gateway"]["http_listen"] == f"{LOOPBACK}:8123"
    for section, model in (
        ("coordinator", CoordinatorSettings),
        ("gateway", GatewaySettings),
        ("node", NodeSettings),
    ):
        model(**made[section])


def test_no_two_components_of_a_standby_share_a_port(host: FakeHost, root: Path) -> None:
    """The usual ports are taken, and neither node nor proxy listens while it becomes a standby. An earlier
    release may have written that they share."""
    host.ports |= {7700, 7701, 7710, 7780, 7781, 8080}
    node = other(host, root)["listen"]
    port = parse_address(node)[1]
    proxy = port + 1
    for name, shared in (("listen", port), ("join_listen", proxy)):
        with (root / "config" / "coordinator.toml").open("a") as file:
            file.write("[coordinator]\n" * (name == "listen") + f'{name} = "{LOOPBACK}:{shared}"\n')
    made = choose_other(host, root, {}, Wishes(), ["10.0.0.1:7700"], joined=True, proxy=proxy).settings
    listens = [str(one[name]) for one in made.values() for name in one if name.endswith("listen")]
    ports = [parse_address(one)[1] for one in listens]
    assert len(set(ports)) == len(ports) == 6, listens
    assert made["node"]["listen"] == node


def test_a_standby_that_only_its_own_machine_reaches_listens_there_alone(host: FakeHost, root: Path) -> None:
    host.addresses = [OwnAddress("127.0.0.2", "lo0")]
    made = choose_other(host, root, {}, Wishes("127.0.0.2"), COORDINATORS, joined=True, proxy=8123).settings
    assert made["coordinator"]["listen"] == "127.0.0.2:7700"


def test_a_members_port_for_programs_is_kept(host: FakeHost, root: Path) -> None:
    """Also while another program has it: programs are set to it."""
    root.mkdir(parents=True, exist_ok=True)
    assert choose_proxy(host, root, None, f"{LOOPBACK}:7710") == (PROXY_PORT, "")
    host.ports.add(PROXY_PORT)
    port, taken = choose_proxy(host, root, None, f"{LOOPBACK}:7710")
    assert (port != PROXY_PORT, taken) == (True, "")
    (root / PORTS).write_text(json.dumps({"proxy": 8123}))
    assert choose_proxy(host, root, None, f"{LOOPBACK}:7710") == (8123, "")
    host.ports.add(8123)
    port, taken = choose_proxy(host, root, None, f"{LOOPBACK}:7710")
    assert port == 8123
    assert "8123" in taken
    assert choose_proxy(host, root, 9000, f"{LOOPBACK}:7710") == (9000, "")


def test_the_lan_door_is_set_only_by_its_option_and_at_each_start(host: FakeHost, root: Path) -> None:
    everywhere = Wishes(lan=True)
    for wishes, listen in (
        (Wishes(), None),
        (everywhere, "0.0.0.0:8443"),
        (Wishes(), None),
        (Wishes(LOOPBACK, lan=True), f"{LOOPBACK}:8443"),
    ):
        made = first(host, root, wishes).settings["gateway"]
        assert made.get("lan_listen") == listen
        assert GatewaySettings(**made).lan_listen == listen
        assert made["http_listen"] == f"{LOOPBACK}:8080", "loopback stays as it is"
    host.ports.add(8443)
    taken = first(host, root, Wishes(LOOPBACK, lan=True)).settings["gateway"]["lan_listen"]
    assert taken == f"{LOOPBACK}:8443", "the port of the last time is kept"
    first(host, root, Wishes(LOOPBACK))
    assert first(host, root, Wishes(LOOPBACK, lan=True)).settings["gateway"]["lan_listen"] != taken
