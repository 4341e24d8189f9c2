"""What `sealring up` and `sealring join` choose: what was said, what was before, what can be."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import up
from sealring.cli.local.machines import FirstMachine, OtherMachine
from sealring.cli.setup import choices
from sealring.cli.setup.choices import Choices, Wishes, choose_first, choose_other
from sealring.mesh.errors import ConfigError, InvalidInput, PermissionDenied
from sealring.mesh.member.state import IDENTITY_KEY
from sealring.mesh.system.addresses import free_port, parse_address
from sealring.mesh.system.networks import OwnAddress
from sealring.mesh.trust.levels import TrustLevel
from sealring.node.identity.choice import IdentityChoice

LOOPBACK = "127.0.0.1"
HERE = Wishes(address=LOOPBACK)
USUAL = dict(choices._PORTS)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other cluster of this machine has the usual ports, and no settings are in the environment."""
    for key, port in list(choices._PORTS.items()):
        monkeypatch.setitem(choices._PORTS, key, free_port())
        assert port
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def nobody(found: Any) -> OwnAddress:
    raise AssertionError("nobody is asked")


def first(root: Path, wishes: Wishes = HERE, settings: str = "", ask: Any = nobody) -> Choices:
    file = None
    if settings:
        file = root.with_suffix(".toml")
        file.write_text(settings)
    made = choose_first(root, file, wishes, ask)
    root.mkdir(exist_ok=True)
    FirstMachine(root, made.settings).write_configs()
    return made


def test_everything_listens_at_the_address_that_was_named(tmp_path: Path) -> None:
    made = first(tmp_path / "root").settings
    assert made["coordinator"]["listen"] == f"{LOOPBACK}:{choices._PORTS['coordinator', 'listen']}"
    assert made["node"]["ring_host"] == LOOPBACK
    assert parse_address(made["gateway"]["http_listen"])[0] == LOOPBACK
    assert made["node"]["allow_downloads"] is True
    assert made["coordinator"]["state_dir"] == str(tmp_path / "root" / "coordinator")


def test_a_port_that_is_taken_is_passed_over_and_what_was_chosen_stays(tmp_path: Path) -> None:
    usual = choices._PORTS["gateway", "http_listen"]
    with socket.create_server((LOOPBACK, usual)):
        made = first(tmp_path / "root").settings
    assert made["gateway"]["http_listen"] != f"{LOOPBACK}:{usual}"
    again = first(tmp_path / "root", Wishes()).settings
    assert again == made, "the address as well, though loopback is none that others reach"


def test_the_users_settings_stand(tmp_path: Path) -> None:
    settings = f"""
[coordinator]
listen = "{LOOPBACK}:7"
roster_lifetime = 60
[node]
name = "attic"
allow_downloads = false
"""
    made = first(tmp_path / "root", settings=settings).settings
    assert made["coordinator"]["listen"] == f"{LOOPBACK}:7"
    assert made["coordinator"]["roster_lifetime"] == 60
    assert (made["node"]["name"], made["node"]["allow_downloads"]) == ("attic", False)
    named = first(tmp_path / "root", Wishes(LOOPBACK, "cellar", downloads=True), settings).settings["node"]
    assert (named["name"], named["allow_downloads"]) == ("cellar", True)


def test_one_of_several_addresses_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [OwnAddress("10.9.9.9", "en0"), OwnAddress(LOOPBACK, "bridge0")]
    monkeypatch.setattr(choices, "own_addresses", lambda: both)
    asked: list[Any] = []

    def ask(found: Any) -> OwnAddress:
        asked.append(found)
        return both[1]

    made = first(tmp_path / "root", Wishes(), ask=ask)
    assert asked == [both]
    assert made.settings["node"]["listen"].startswith(f"{LOOPBACK}:")
    assert first(tmp_path / "root", Wishes(), ask=ask).settings == made.settings
    assert len(asked) == 1, "the second time it is known"


def test_another_address_than_before_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first(tmp_path / "root")
    file = tmp_path / "root" / "config" / "coordinator.toml"
    file.write_text(file.read_text().replace(f"{LOOPBACK}:", "10.254.254.254:"))
    monkeypatch.setattr(choices, "own_addresses", lambda: [OwnAddress(LOOPBACK, "en0")])
    made = first(tmp_path / "root", Wishes())
    assert any("it was 10.254.254.254" in line and "join again" in line for line in made.said)


def test_without_a_network_it_says_that_nobody_can_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "own_addresses", list)
    made = first(tmp_path / "root", Wishes())
    assert any("no other machine can join" in line for line in made.said)


@pytest.mark.parametrize(
    ("wished", "found", "before", "host", "lines"),
    [
        ("127.0.0.1", [], None, "127.0.0.1", 1),
        (None, [], None, "127.0.0.1", 0),
        (None, [LOOPBACK], None, "127.0.0.1", 1),
        (None, [], "127.0.0.1", "127.0.0.1", 1),
        (None, [LOOPBACK], "127.0.0.1", "127.0.0.1", 1),
        ("127.0.0.1", [], "10.254.254.254", "127.0.0.1", 2),
        (None, [LOOPBACK], "10.254.254.254", "127.0.0.1", 2),
        (None, [], "10.254.254.254", "127.0.0.1", 0),
    ],
)
def test_it_is_said_where_this_machine_is_reached_and_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
    wished: str | None,
    found: list[str],
    before: str | None,
    host: str,
    lines: int,
) -> None:
    monkeypatch.setattr(choices, "own_addresses", lambda: [OwnAddress(one, "en0") for one in found])
    made, last = Choices(), {"listen": f"{before}:7700"} if before else {}
    assert choices._first_host({}, last, Wishes(wished), nobody, made) == host
    told = [
        f"address: it was {before}: machines that joined there have to join again",
        f"address: {host}, where the other machines reach this one (or --address)",
    ]
    none = [f"address: {LOOPBACK}: there is no network, so no other machine can join"]
    assert made.said == (told[2 - lines :] if lines else none)


def test_what_nobody_wished_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Wishes().of_node() == {}
    assert Wishes(name="two", downloads=False, software_identity_allowed=False).of_node() == {
        "name": "two",
        "allow_downloads": False,
        "software_identity_allowed": False,
    }
    models = Wishes(models=[Path("two"), Path("/three")]).of_node()["models"]
    assert models == [str(tmp_path / "two"), "/three"]


@pytest.mark.parametrize("address", ["10.254.254.254", "0.0.0.0", "studio.local", "::1", "224.0.0.1"])
def test_an_address_that_is_not_this_machines_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(InvalidInput) as error:
        first(tmp_path / "root", Wishes(address))
    assert error.value.reason == "BAD_ADDRESS"


def test_the_level_of_the_machine_decides_whom_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody decides; and what was decided stays."""

    def allowed(root: str, wish: bool | None = None) -> tuple[bool, bool]:
        made = first(tmp_path / root, Wishes(LOOPBACK, software_identity_allowed=wish)).settings
        return tuple(made[part]["software_identity_allowed"] for part in ("coordinator", "node"))  # type: ignore[return-value]

    assert allowed("soft") == (True, True)
    with pytest.raises(PermissionDenied) as error:
        allowed("soft", wish=False)
    assert error.value.reason == "SOFTWARE_IDENTITY"
    helper = Path("/usr/local/bin/sealring-enclave")
    enclave = IdentityChoice(TrustLevel.SELF_SIGNED, helper, "")
    monkeypatch.setattr("sealring.node.identity.choice.choose_identity", lambda settings: enclave)
    assert allowed("enclave") == (False, False)
    assert allowed("enclave", wish=True) == (True, True)
    assert allowed("enclave")[0] is True
    assert allowed("enclave", wish=False) == (False, False)
    poor = IdentityChoice(TrustLevel.SOFTWARE, helper, "FileVault is off")
    monkeypatch.setattr("sealring.node.identity.choice.choose_identity", lambda settings: poor)
    assert allowed("poor") == (True, True)


def test_another_machine_takes_its_address_on_the_way_to_the_coordinator(tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = choose_other(root, {}, Wishes(name="two"), [f"{LOOPBACK}:7701"])
    assert list(made.settings) == ["node"]
    node = made.settings["node"]
    assert (node["ring_host"], node["name"]) == (LOOPBACK, "two")
    root.mkdir()
    OtherMachine(root, made.settings).write_configs()
    again = choose_other(root, {}, Wishes(), [])
    assert again.settings == made.settings


def test_another_machine_that_has_a_new_address_goes_on_with_that(tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = choose_other(root, {}, Wishes(), [f"{LOOPBACK}:7701"])
    root.mkdir()
    OtherMachine(root, made.settings).write_configs()
    file = root / "config" / "node.toml"
    file.write_text(file.read_text().replace(LOOPBACK, "10.254.254.254"))
    again = choose_other(root, {}, Wishes(), [f"{LOOPBACK}:7700"])
    assert again.settings == made.settings


def test_a_machine_that_has_joined_keeps_the_address_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`join` begins anew without its options, and so does whoever types it again."""
    root = tmp_path / "root"
    made = choose_other(root, {}, HERE, ["10.0.0.1:7701"])
    root.mkdir()
    OtherMachine(root, made.settings).write_configs()
    monkeypatch.setattr(choices, "address_towards", lambda host, port: "10.0.0.2")
    assert choose_other(root, {}, Wishes(), ["10.0.0.1:7700"], joined=True).settings == made.settings


def test_a_nodes_port_that_others_have_taken_is_chosen_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = choose_other(root, {}, HERE, [])
    root.mkdir()
    OtherMachine(root, made.settings).write_configs()
    host, port = parse_address(made.settings["node"]["listen"])
    with socket.create_server((host, port)):
        again = choose_other(root, {}, HERE, []).settings["node"]["listen"]
    assert parse_address(again)[0] == host
    assert parse_address(again)[1] != port


def test_a_nodes_port_that_is_free_stays(tmp_path: Path) -> None:
    root, port = tmp_path / "root", free_port()
    (root / "config").mkdir(parents=True)
    (root / "config" / "node.toml").write_text(f'[node]\nlisten = "{LOOPBACK}:{port}"\n')
    assert choose_other(root, {}, HERE, []).settings["node"]["listen"] == f"{LOOPBACK}:{port}"


def test_a_machine_without_a_way_to_the_coordinator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "address_towards", lambda host, port: None)
    with pytest.raises(ConfigError) as error:
        choose_other(tmp_path / "root", {}, Wishes(), ["10.0.0.1:7701"])
    assert error.value.reason == "NO_ADDRESS"


def test_a_machine_that_joins_anew_takes_the_way_there_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    made = choose_other(root, {}, HERE, [])
    root.mkdir()
    OtherMachine(root, made.settings).write_configs()
    monkeypatch.setattr(choices, "is_free", lambda host, port: True)
    monkeypatch.setattr(choices, "address_towards", lambda host, port: "10.0.0.2")
    assert choose_other(root, {}, Wishes(), ["10.0.0.1:7700"]).settings["node"]["ring_host"] == "10.0.0.2"
    said = {"listen": "10.0.0.3:1"}
    assert choose_other(root, said, Wishes(), ["10.0.0.1:7700"]).settings["node"]["ring_host"] == "10.0.0.3"


def test_an_address_is_tried_at_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(choices, "is_free", lambda *of: not tried.append(of))
    assert choices._checked(LOOPBACK) == LOOPBACK
    assert tried == [(LOOPBACK, 0)]


def test_where_components_listen_on_a_machine_of_their_own() -> None:
    assert {" ".join(name): port for name, port in USUAL.items()} == {
        "coordinator listen": 7700,
        "coordinator join_listen": 7701,
        "node listen": 7710,
        "gateway grpc_listen": 7780,
        "gateway http_listen": 8080,
    }


@pytest.mark.parametrize("address", ["0.0.0.0:7", "[::1]:7", "studio.local:7", "127.0.0.1", None])
def test_what_names_no_ipv4_address_names_none(address: str | None) -> None:
    assert choices._host_of({"listen": address}) is None
    assert choices._host_of({"listen": "10.0.0.1:7"}) == "10.0.0.1"


@pytest.mark.parametrize(("address", "port"), [("a:7", 7), ("a:0", None), ("a", None), (None, None)])
def test_a_port_that_is_open_is_none(address: str | None, port: int | None) -> None:
    assert choices._port_of(address) == port


def test_each_choice_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*found: Any, **wished: Any) -> list[str]:
        found_here = IdentityChoice(*found)
        monkeypatch.setattr("sealring.node.identity.choice.choose_identity", lambda settings: found_here)
        return choose_first(tmp_path / "root", None, Wishes(LOOPBACK, **wished), nobody).said

    taken = "(--software-identity-allowed and --no-software-identity-allowed)"
    address = f"address: {LOOPBACK}, where the other machines reach this one (or --address)"
    assert chosen(TrustLevel.SOFTWARE, None, "there is no helper") == [
        address,
        "identity: software: there is no helper",
        "models: in the Hugging Face cache; others are downloaded (--models, --downloads)",
        f"trust: machines with a key in a file can join too {taken}",
    ]
    helper = Path("/bin/sh")
    assert chosen(TrustLevel.SELF_SIGNED, helper, "", models=[tmp_path, Path("/b")], downloads=False) == [
        address,
        "identity: self_signed",
        f"models: in {tmp_path}, /b; none are downloaded (--models, --downloads)",
        f"trust: only machines that claim a key in a Secure Enclave, or better, can join {taken}",
    ]


@pytest.mark.parametrize(("enrolled", "key"), [(True, True), (True, False), (False, True)])
def test_who_joined_with_a_key_in_a_file_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enrolled: bool, key: bool
) -> None:
    helper = Path("/bin/sh")
    better = IdentityChoice(TrustLevel.SELF_SIGNED, helper, "")
    monkeypatch.setattr("sealring.node.identity.choice.choose_identity", lambda settings: better)
    node = tmp_path / "root" / "node"
    node.mkdir(parents=True)
    for name, there in (("member.json", enrolled), (IDENTITY_KEY, key)):
        if there:
            (node / name).write_text("{}")
    kept = enrolled and key
    made = choose_first(tmp_path / "root", None, HERE, nobody)
    assert made.settings["node"].get("enclave_helper") == (None if kept else str(helper))
    assert ("identity: software: the key that it has joined with is in a file" in made.said) == kept
    chosen = choose_first(tmp_path / "root", named(tmp_path, helper), HERE, nobody)
    assert chosen.settings["node"]["enclave_helper"] == str(helper)


def named(folder: Path, helper: Path) -> Path:
    """A settings file that names a helper."""
    file = folder / "s.toml"
    file.write_text(f'[node]\nenclave_helper = "{helper}"\n')
    return file


def test_a_bad_name_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        first(tmp_path / "root", Wishes(LOOPBACK, name="Not A Name"))
    assert error.value.reason == "BAD_SETTING"


def test_people_are_asked_until_they_name_one_and_scripts_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [OwnAddress("10.0.0.1", "en0"), OwnAddress("10.0.1.1", "bridge0")]
    answers = iter([0, 3, 2])
    asked: list[Any] = []

    def prompt(question: str, **options: Any) -> int:
        asked.append(options)
        return next(answers)

    monkeypatch.setattr("typer.prompt", prompt)
    assert up._ask(found) == found[0], "nobody is there"
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert up._ask(found) == found[1]
    assert "2  10.0.1.1 (bridge0)" in capsys.readouterr().err
    assert list(answers) == []
    assert asked == [{"default": 1, "type": int, "err": True}] * 3, "standard output may be JSON"
