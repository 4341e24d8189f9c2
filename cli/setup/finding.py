"""The token of a machine that joins with a code: it finds the cluster, and a person types what it shows."""

from __future__ import annotations

import re

from sealring.cli.terminal.host import Host
from sealring.cli.terminal.options import read_token
from sealring.cli.terminal.output import progress, say
from sealring.mesh.errors import InvalidInput, PermissionDenied, ResourceExhausted, Unavailable
from sealring.mesh.member.joincode import Offer
from sealring.mesh.system.addresses import format_address, parse_address

JOIN_PORT = 7701
_LOOK_SECONDS = 10.0
_MOST_TYPED, _MOST_SECONDS = 7, 60
_TOKEN = re.compile(r"sr[0-9]+\.")


def address_in(text: str) -> str | None:
    """The host:port in what was given instead of a token, the usual port where none is; None for a token."""
    text = text.strip()
    if " " in text or _TOKEN.match(text) or not set(".:") & set(text):
        return None
    for address in (text, f"{text}:{JOIN_PORT}", f"[{text}]:{JOIN_PORT}"):
        try:
            return format_address(*parse_address(address))
        except InvalidInput:
            continue
    return None


def find_token(host: Host, given: str | None) -> str:
    """A join token: the one that was given, or one for the code of the cluster at the address that was
    given, or of one on this network.

    Raises InvalidInput (BAD_TOKEN) where nobody can be asked, and as `token_for`.
    """
    address = None if given is None else address_in(given)
    if given is not None and address is None:
        return read_token(given)
    if not host.can_ask:
        raise InvalidInput(
            "this machine has not joined a cluster, and nobody can type a code",
            hint="give a token: what `sealring token create` prints on the first machine",
            reason="BAD_TOKEN",
        )
    found = _on_network(host) if address is None else [_at(host, address)]
    if not found:
        said = str(host.ask("The first machine's address, or a join token"))
        address = address_in(said)
        if address is None:
            return read_token(said)
        found = [_at(host, address)]
    offer = found[0]
    if len(found) > 1:
        offer = found[host.choose("Which one is it?", [_shown(one) for one in found])]
    else:
        say(f"cluster {_shown(offer)}")
    return _exchange(host, offer)


def _on_network(host: Host) -> list[Offer]:
    from sealring.mesh.member.discovery import find_clusters

    with progress("looking for clusters on this network"):
        try:
            found = host.run(host.reach(find_clusters, [one.host for one in host.own_addresses()]))
        except Unavailable as error:
            say(str(error))
            return []
    if not found:
        say("no cluster on this network lets machines join with a code now")
        say("(on the first machine: `sealring up`, or `sealring token code`)")
        if host.platform == "darwin":
            say("(on a Mac: Privacy & Security > Local Network has to allow this terminal)")
    return found


def _at(host: Host, address: str) -> Offer:
    from sealring.mesh.member.bootstrap import claimed_root

    pin, root = host.run(host.reach(claimed_root, *parse_address(address), deadline=_LOOK_SECONDS))
    return Offer(pin, root.cluster, (address,))


def _shown(offer: Offer) -> str:
    from sealring.mesh.member.joincode import short_hash

    return f"{offer.name} ({short_hash(offer.root_sha256)}) at {', '.join(offer.addresses)}"


def _exchange(host: Host, offer: Offer) -> str:
    """Asks for the code until it is right, or nobody joins with it any more. It is typed for each try: who
    stands in for the coordinator could test one code by each."""
    from sealring.mesh.member.joincode import token_for

    for left in reversed(range(_MOST_TYPED)):
        code = _typed(host)
        try:
            with progress("proving the code"):
                return host.run(host.reach(token_for, offer, code)).format()
        except (PermissionDenied, ResourceExhausted) as error:
            used_up = error.metadata.get("tries_left") == "0"
            if not left or used_up or error.reason not in ("WRONG_CODE", "CODE_WAIT"):
                raise
            say(str(error))
            _count_down(host, error.metadata.get("retry_after", "0"))
    raise AssertionError


def _typed(host: Host) -> str:
    from sealring.mesh.member.joincode import parse_code

    while True:
        try:
            return parse_code(str(host.ask("The code that its first machine shows")))
        except InvalidInput as error:  # which costs no try
            say(str(error))


def _count_down(host: Host, seconds: str) -> None:
    least = min(int(seconds), _MOST_SECONDS) if seconds.isdecimal() else 0
    with progress("") as shown:
        for left in range(least, 0, -1):
            shown.update(f"another code can be tried in {left} s")
            host.pause(1)
