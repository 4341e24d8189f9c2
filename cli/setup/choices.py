"""The defaults that `sealring up` and `sealring join` choose, with a line about each.

The user's settings file and environment come first. Earlier choices come next if they are still possible.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealring.cli.here.settings_files import proxy_port, read_settings, settings_file_of
from sealring.cli.terminal.host import Host
from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.member.state import IDENTITY_KEY
from sealring.mesh.system.addresses import format_address, free_port, is_loopback, parse_address
from sealring.mesh.system.networks import ANY_HOST
from sealring.mesh.system.paths import is_enrolled
from sealring.mesh.trust.levels import TrustLevel

if TYPE_CHECKING:
    from sealring.node.settings import NodeSettings

_KEPT = ("name", "models", "allow_downloads", "enclave_helper")
"""A node's settings that hold for its next start too."""

_LOOPBACK = "127.0.0.1"
_PORTS = {
    ("coordinator", "listen"): 7700,
    ("coordinator", "join_listen"): 7701,
    ("node", "listen"): 7710,
    ("gateway", "grpc_listen"): 7780,
    ("gateway", "http_listen"): 8080,
}
_MEMBERS = {("gateway", "members_listen"): 7781}
_LAN = {("gateway", "lan_listen"): 8443}
PROXY_PORT = 8080


@dataclass
class Choices:
    """The settings of each component, by its section, and a line about each choice."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wishes:
    """The options of the command line; None for those that were not given."""

    address: str | None = None
    name: str | None = None
    models: Sequence[Path] = ()
    downloads: bool | None = None
    software_identity_allowed: bool | None = None
    announce: bool | None = None
    lan: bool = False

    def of_node(self) -> dict[str, Any]:
        """The given ones, as settings of a node."""
        wished: dict[str, Any] = {
            "name": self.name,
            "models": [str(folder.absolute()) for folder in self.models] or None,
            "allow_downloads": self.downloads,
            "software_identity_allowed": self.software_identity_allowed,
        }
        return {name: value for name, value in wished.items() if value is not None}


def choose_first(host: Host, root: Path, file: Path | None, wishes: Wishes) -> Choices:
    """Choices for the machine with coordinator, gateway and a node. Makes the node's identity key if it is
    missing.

    The coordinator is reached at every address of this machine, unless one is named. `root` is the folder of
    all state, `file` the user's settings file. Raises ConfigError, PermissionDenied (SOFTWARE_IDENTITY),
    InvalidInput (BAD_ADDRESS).
    """
    given = {section: settings_given(section, file) for section in ("coordinator", "gateway", "node")}
    before = {section: read_settings(settings_file_of(root, section), section) for section in given}
    made = Choices()
    named = _named_address(host, given["coordinator"], before["coordinator"], wishes, made)
    coordinator = _listening(host, "coordinator", named or ANY_HOST, given, before)
    found = host.own_addresses()
    address = named or (found[0].host if found else _LOOPBACK)
    gateway = _listening(host, "gateway", _LOOPBACK, given, before)
    usual = {**_MEMBERS, **(_LAN if wishes.lan else {})}
    gateway |= _listening(host, "gateway", named or ANY_HOST, given, before, usual=usual)
    node = _node(host, address, root, given, before, wishes, made)
    allowed = before["coordinator"].get("software_identity_allowed", False) is True
    coordinator["software_identity_allowed"] = allowed or node["software_identity_allowed"]
    if wishes.software_identity_allowed is not None:
        given["coordinator"]["software_identity_allowed"] = wishes.software_identity_allowed
    coordinator["hidden"] = before["coordinator"].get("hidden", False) is True
    if wishes.announce is not None:
        given["coordinator"]["hidden"] = not wishes.announce
    made.settings = {
        "coordinator": {"state_dir": str(root / "coordinator"), **coordinator, **given["coordinator"]},
        "gateway": {"state_dir": str(root / "gateway"), **gateway, **given["gateway"]},
        "node": node,
    }
    taken = "only machines that claim a key in a Secure Enclave, or better, can join"
    if made.settings["coordinator"]["software_identity_allowed"]:
        taken = "machines with a key in a file can join too"
    if address != _LOOPBACK:
        hidden = made.settings["coordinator"]["hidden"]
        shown = "no" if hidden else "while the join code is good, or a machine of the cluster is away"
        made.said.append(f"announced on this network: {shown} (--announce and --no-announce)")
    made.said.append(f"trust: {taken} (--software-identity-allowed and --no-software-identity-allowed)")
    return made


def choose_other(
    host: Host,
    root: Path,
    said: Mapping[str, Any],
    wishes: Wishes,
    coordinators: Sequence[str],
    *,
    joined: bool = False,
    proxy: int = 0,
) -> Choices:
    """Choices for a machine with a node alone, whose coordinator is at one of `coordinators` (host:port).

    `said` is what the user's settings say of a node. One that has `joined` keeps its address for as long as
    this machine has it. With `proxy`, the port for programs, it is the standby as well, with a coordinator
    that follows and a gateway. Raises as `choose_first`, and ConfigError (NO_ADDRESS).
    """
    given = {"node": dict(said)}
    before = {"node": read_settings(settings_file_of(root, "node"), "node")}
    made = Choices()
    address = wishes.address or _host_of(given["node"])
    last = _host_of(before["node"])
    own = [one.host for one in host.own_addresses()]
    if address is None and joined and last is not None and (last in own or is_loopback(last)):
        address = last
    if address is None:
        ways = (host.address_towards(*parse_address(one)) for one in coordinators)
        address = next((way for way in ways if way is not None), None) or last
        if address is None:
            raise ConfigError(
                "this machine has no network address towards the coordinator",
                hint="connect it to the network, or name its address with --address",
                reason="NO_ADDRESS",
            )
    made.said.append(_reached(host, address))
    node = _node(host, address, root, given, before, wishes, made)
    made.settings = (
        {"node": node} if not proxy else {**_standby(host, root, node, coordinators, proxy), "node": node}
    )
    return made


def _standby(
    host: Host, root: Path, node: Mapping[str, Any], coordinators: Sequence[str], proxy: int
) -> dict[str, dict[str, Any]]:
    """The settings of a standby's coordinator and gateway, beside those of its node."""
    given: dict[str, dict[str, Any]] = {"coordinator": {}, "gateway": {}}
    before = {section: read_settings(settings_file_of(root, section), section) for section in given}
    here = _host_of(node)
    bound = here if here is not None and is_loopback(here) else ANY_HOST
    others = {proxy, *filter(None, [_port_of(node.get("listen"))])}  # neither may listen now
    coordinator = _listening(host, "coordinator", bound, given, before, others=others)
    coordinator["software_identity_allowed"] = node["software_identity_allowed"]
    gateway = _listening(host, "gateway", _LOOPBACK, given, before, others=others)
    gateway |= _listening(host, "gateway", bound, given, before, usual=_MEMBERS, others=others)
    gateway["http_listen"] = format_address(_LOOPBACK, proxy)
    return {
        "coordinator": {"state_dir": str(root / "coordinator"), "standby": coordinators[0], **coordinator},
        "gateway": {
            "state_dir": str(root / "gateway"),
            "name": f"{node.get('name', 'standby')}-gateway",
            **gateway,
        },
    }


def choose_proxy(host: Host, root: Path, wished: int | None, node: str) -> tuple[int, str]:
    """The port of a member's proxy on loopback: as wished, else that of the last time, to which programs may
    be set, else the usual one or a free one. And why it cannot listen there yet, if so.

    `node` is host:port of the node, which may not listen yet.
    """
    port = wished or proxy_port(root)
    if not port:
        ports = chain([PROXY_PORT], iter(lambda: free_port(_LOOPBACK), 0))
        others = parse_address(node)[1]
        return next(one for one in ports if one != others and host.is_free(_LOOPBACK, one)), ""
    taken = f"port {port} of this machine, for your programs, is taken now (--port for another)"
    return port, "" if host.is_free(_LOOPBACK, port) else taken


def _named_address(
    host: Host, given: Mapping[str, Any], before: Mapping[str, Any], wishes: Wishes, made: Choices
) -> str | None:
    """The one address at which others reach the coordinator, if one was named; None means all of them."""
    address, last = wishes.address or _host_of(given), _host_of(before)
    found = host.own_addresses()
    if address is None and last in (_LOOPBACK, *(one.host for one in found)):
        address = last
    if last is not None and address != last:
        made.said.append(f"address: it was {last}. The other machines look for this one on their network")
    if address is not None:
        made.said.append(_reached(host, address))
    elif found:
        shown = ", ".join(map(str, found))
        made.said.append(f"addresses: {shown}; other machines reach this one at any (--address for one)")
    else:
        made.said.append("addresses: none. Start `sealring up` again on a network, so that others can join")
    return address


def _node(
    host: Host,
    address: str,
    root: Path,
    given: Mapping[str, Mapping[str, Any]],
    before: Mapping[str, Mapping[str, Any]],
    wishes: Wishes,
    made: Choices,
) -> dict[str, Any]:
    from sealring.node.identity.attestor import require_software_allowed
    from sealring.node.identity.choice import IdentityChoice

    own = _host_of(given["node"]) or address
    everywhere = own != _LOOPBACK and "ring_host" not in given["node"]
    settings: dict[str, Any] = {
        "state_dir": str(root / "node"),
        "allow_downloads": True,
        "ring_host": own,
        "measure_links": everywhere,
        **{name: before["node"][name] for name in _KEPT if name in before["node"]},
        **_listening(host, "node", address, given, before, everywhere=everywhere),
        **given["node"],
        **wishes.of_node(),
    }
    checked = _node_settings(settings)
    enrolled = is_enrolled(checked.state_dir)
    if enrolled and checked.enclave_helper is None and (checked.state_dir / IDENTITY_KEY).exists():
        found = IdentityChoice(TrustLevel.SOFTWARE, None, "the key that it has joined with is in a file")
    else:
        found = host.identity(checked)
    if found.helper is not None:
        settings["enclave_helper"] = str(found.helper)
    allowed = settings.setdefault("software_identity_allowed", found.level is TrustLevel.SOFTWARE)
    made.said.append(f"identity: {found.level}{': ' + found.why if found.why else ''}")
    require_software_allowed("software" if found.helper is None else "secure_enclave", allowed=allowed)
    folders = ", ".join(settings.get("models", [])) or "the Hugging Face cache"
    loads = "any other is downloaded" if settings["allow_downloads"] else "no other is downloaded"
    made.said.append(f"models: those in {folders}; {loads} (--models, --downloads)")
    return settings


def _node_settings(settings: Mapping[str, Any]) -> NodeSettings:
    from sealring.mesh.settings.config import load
    from sealring.node.settings import NodeSettings

    return load(NodeSettings, "node", flags=settings, environment={}).settings


def settings_given(section: str, file: Path | None) -> dict[str, Any]:
    """A section's settings in the user's settings file and environment, validated."""
    from sealring.cli.terminal.command import settings_model
    from sealring.mesh.settings.config import load

    loaded = load(settings_model(section), section, file=file)
    values = loaded.settings.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in values.items() if loaded.origin[name] != "default"}


def folders_of(root: Path, file: Path | None) -> dict[str, Path]:
    """The state folders of a machine's components, below `root` unless the user's settings say where."""
    names = ("coordinator", "gateway", "node")
    return {name: Path(settings_given(name, file).get("state_dir", root / name)) for name in names}


def _host_of(settings: Mapping[str, Any]) -> str | None:
    """The IPv4 address that a component listens at, if its settings name one."""
    try:
        host = parse_address(str(settings.get("listen")))[0]
        return None if ipaddress.IPv4Address(host).is_unspecified else host
    except (InvalidInput, ValueError):
        return None


def _listening(
    host: Host,
    section: str,
    own: str,
    given: Mapping[str, Mapping[str, Any]],
    before: Mapping[str, Mapping[str, Any]],
    *,
    everywhere: bool = False,
    usual: Mapping[tuple[str, str], int] = _PORTS,
    others: Collection[int] = (),
) -> dict[str, Any]:
    """A component's addresses on the address `own`: at its earlier port, the usual one, or a free one, but at
    none of the ports of the `others`, which may not listen yet.

    One that listens `everywhere` needs a port that is free on every interface.
    """
    bound = ANY_HOST if everywhere else own
    chosen: dict[str, Any] = {}
    for (owner, name), default in usual.items():
        if owner != section or name in given[section]:
            continue
        port = _port_of(before[section].get(name))
        if section == "node" and port is not None and not host.is_free(bound, port):
            port = None  # taken meanwhile; a node tells the others its new one
        if port is None or port in others:
            free = chain([default] * host.is_free(bound, default), iter(lambda: free_port(bound), 0))
            port = next(one for one in free if one not in others)
        chosen[name] = format_address(own, port)
    return chosen


def _port_of(address: Any) -> int | None:
    try:
        return parse_address(str(address))[1] or None
    except InvalidInput:
        return None


def _reached(host: Host, own: str) -> str:
    """The line about the address `own`.

    Raises InvalidInput (BAD_ADDRESS) unless it is an IPv4 address of this machine.
    """
    try:
        address = ipaddress.IPv4Address(own)
        unusable = address.is_unspecified or address.is_multicast or not host.is_free(own, 0)
    except ValueError:
        unusable = True
    if unusable:
        raise InvalidInput(
            f"{own[:64]} is not an IPv4 address of this machine",
            hint=f"it has {', '.join(map(str, host.own_addresses())) or 'none'}",
            reason="BAD_ADDRESS",
            param="address",
        )
    if address.is_loopback:
        return f"address: {own}, where only this machine reaches it (or --address)"
    return f"address: {own}, where the other machines reach this one (or --address)"
