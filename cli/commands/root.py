"""`sealring root`: the keys that stand above the coordinator, which may be kept offline.

A version of the root metadata travels as a draft: the first is made by `sealring coordinator prepare`, later
ones from the chain in use (`rotate`). The holders of the keys sign it wherever they are (`sign`). It goes
into the coordinator's folder by `sealring coordinator init --root-metadata`, later ones by `install`.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, Seconds, cannot_write, public_keys, read_file, write_file
from sealring.cli.terminal.output import moment, print_data, print_json, say, until
from sealring.mesh.errors import InvalidInput

if TYPE_CHECKING:
    from sealring.mesh.pki.root import RootMetadata

app = typer.Typer(name="root", help="The root keys and what they sign.", no_args_is_help=True)

_MAX_FILE = 128 << 10
_DAY = 86400
Chain = Annotated[Path, typer.Argument(metavar="CHAIN", help="root.dsse of the coordinator's folder")]
Draft = Annotated[Path, typer.Argument(metavar="DRAFT", help="draft of the next version")]


@command(app, example="sealring root init --key root.key")
def init(
    key: Annotated[Path, typer.Option(metavar="FILE", help="where the new key goes, mode 0600")],
    as_json: AsJson = False,
) -> None:
    """Make a root key; prints its public half."""
    _print(_make_key(key), "public_key", as_json=as_json)
    say(f"made the root key {key}; keep it off the coordinator, and keep a copy")


@command(app, example="sealring root roster-key --key /mnt/second/roster.key")
def roster_key(
    key: Annotated[Path, typer.Option(metavar="FILE", help="where the new key goes, mode 0600")],
    as_json: AsJson = False,
) -> None:
    """Make a further roster key for the coordinator; prints its public half."""
    _print(_make_key(key), "public_key", as_json=as_json)
    say(f"made the roster key {key}; it signs once the root names it and roster_key_files does")


@command(app, example="sealring root show root.dsse")
def show(context: typer.Context, chain: Chain, as_json: AsJson = False) -> None:
    """Show a chain of root metadata, or a draft, and check what of it can be checked."""
    found = _describe(chain)
    if as_json:
        print_json(found)
        return
    for name in ("cluster", "version", "state", "root_sha256", "root_threshold", "roster_threshold"):
        print_data(f"{name.replace('_', ' ')} {found[name]}")
    print_data(f"issued {moment(found['issued'])}, expires {until(found['expires'], host_of(context).now())}")
    for kind in ("root_keys", "roster_keys"):
        for value in found[kind]:
            print_data(f"{kind.removesuffix('s').replace('_', ' ')} {value}")
    for value in found["authorities_sha256"]:
        print_data(f"authority with certificate hash {value}")
    for value in found["signed_by"]:
        print_data(f"signed by key id {value}")


@command(app, example="sealring root rotate root.dsse --out draft.dsse --roster-key HEX")
def rotate(
    chain: Chain,
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the draft goes")],
    root_key: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="public root key of the new version; may be repeated"),
    ] = None,
    threshold: Annotated[
        int, typer.Option(min=0, max=16, help="root signatures needed [default: as before]")
    ] = 0,
    roster_key: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="public roster key of the new version; may be repeated"),
    ] = None,
    roster_threshold: Annotated[
        int, typer.Option(min=0, max=16, help="roster signatures needed [default: as before]")
    ] = 0,
    lifetime: Annotated[
        Seconds, Seconds.option("how long the new version is good for", least=_DAY, most=3650 * _DAY)
    ] = Seconds(3650 * _DAY),
) -> None:
    """Draft the next version: other keys, or the same for longer.

    With the coordinator's own CHAIN the draft also has a certificate of ten years for its authority.
    """
    import dataclasses

    from sealring.mesh.pki.authority import ClusterCA
    from sealring.mesh.pki.root import draft_root, read_root_draft

    current = _load_chain(chain)
    now, authorities = int(time.time()), current.authorities
    if (chain.parent / "ca.key").exists():
        authority = ClusterCA.load(chain.parent).named_in(authorities)
        authorities = authority.extended(authorities, now=now) if authority is not None else authorities
    draft = dataclasses.replace(
        current,
        version=current.version + 1,
        root_keys=public_keys(root_key or ()) or current.root_keys,
        root_threshold=threshold or current.root_threshold,
        roster_keys=public_keys(roster_key or ()) or current.roster_keys,
        roster_threshold=roster_threshold or current.roster_threshold,
        authorities=authorities,
        issued=now,
        expires=now + int(lifetime),
        chain=(),
    )
    envelope = draft_root(draft)
    read_root_draft(envelope)
    write_file(out, envelope)
    say(f"drafted version {draft.version}; have holders of old and new root keys sign it: sealring root sign")


@command(app, example="sealring root sign draft.dsse --key root.key")
def sign(
    draft: Draft,
    key: Annotated[Path, typer.Option(metavar="FILE", help="the root key to sign with")],
    as_json: AsJson = False,
) -> None:
    """Add a root key's signature to a draft; prints the key's id."""
    from sealring.mesh.crypto.dsse import Ed25519Signer, key_id
    from sealring.mesh.pki.root import cosign_root

    try:
        signer = Ed25519Signer.load(key)
    except FileNotFoundError:
        raise InvalidInput(f"there is no key {key}", reason="BAD_FILE") from None
    write_file(draft, cosign_root(read_file(draft, max_bytes=_MAX_FILE), signer))
    _print(key_id(signer.public_key), "key_id", as_json=as_json)


@command(app, example="sealring root install draft.dsse root.dsse")
def install(draft: Draft, chain: Chain) -> None:
    """Append a fully signed draft to the coordinator's chain; it takes effect at the next start."""
    from sealring.mesh.pki.root import check_root_times, encode_chain, follow_root

    current = _load_chain(chain)
    following = follow_root(read_file(draft, max_bytes=_MAX_FILE), current)
    check_root_times(following, now=time.time())
    write_file(chain, encode_chain(following.chain))
    say(f"installed version {following.version}; restart the coordinator")


def _make_key(file: Path) -> str:
    from sealring.mesh.crypto.dsse import Ed25519Signer

    if not file.parent.is_dir():  # a mistyped volume would be a folder of this disk
        raise InvalidInput(
            f"there is no folder {file.parent}",
            hint="make it, or name another",
            reason="BAD_FILE",
            param="key",
        )
    try:
        return Ed25519Signer.create(file).public_key.hex()
    except OSError as error:
        raise cannot_write(file, error) from None


def _print(value: str, name: str, *, as_json: bool) -> None:
    if as_json:
        print_json({name: value})
    else:
        print_data(value)


def _describe(file: Path) -> dict[str, Any]:
    from sealring.mesh.errors import RosterError
    from sealring.mesh.pki.root import read_root_draft

    try:
        found = _load_chain(file)
        state, signed_by = "valid chain", read_root_draft(found.chain[-1])[1]
    except RosterError as error:
        if error.reason not in ("ROOT_MALFORMED", "ROOT_CHAIN_LENGTH"):
            raise
        found, signed_by = read_root_draft(read_file(file, max_bytes=_MAX_FILE))
        state = "draft, not verified"
    return {
        "cluster": found.cluster,
        "version": found.version,
        "state": state,
        "root_sha256": found.fingerprint.hex(),
        "root_threshold": found.root_threshold,
        "roster_threshold": found.roster_threshold,
        "root_keys": [key.hex() for key in found.root_keys],
        "roster_keys": [key.hex() for key in found.roster_keys],
        "authorities_sha256": [hashlib.sha256(der).hexdigest() for der in found.authorities],
        "issued": found.issued,
        "expires": found.expires,
        "signed_by": list(signed_by),
    }


def _load_chain(file: Path) -> RootMetadata:
    from sealring.mesh.errors import RosterError
    from sealring.mesh.pki.root import decode_chain, follow_root

    found = None
    for envelope in decode_chain(read_file(file, max_bytes=_MAX_FILE)):
        found = follow_root(envelope, found)
    if found is None:
        raise RosterError("root metadata chain is empty", reason="ROOT_CHAIN_LENGTH")
    return found
