"""`sealring root`: the keys that stand above the coordinator, which may be kept offline.

A new version of the root metadata travels as a draft: made from the chain in use (`rotate`), signed by
holders of old and new keys wherever they are (`sign`), and put into the coordinator's folder (`install`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import moment, print_data, print_json, say
from cli.words import AsJson
from mesh.errors import InvalidInput

if TYPE_CHECKING:
    from mesh.rootmeta import RootMetadata

app = typer.Typer()
root = typer.Typer(name="root", help="The root keys and what they sign.", no_args_is_help=True)
app.add_typer(root)

_MAX_FILE = 128 << 10
_DAY = 86400
Chain = Annotated[Path, typer.Argument(metavar="CHAIN", help="root.dsse of the coordinator's folder")]
Draft = Annotated[Path, typer.Argument(metavar="DRAFT", help="draft of the next version")]


@root.command()
def init(
    key: Annotated[Path, typer.Option(metavar="FILE", help="where the new key goes, mode 0600")],
) -> None:
    """Make a root key; prints its public half."""
    from mesh.dsse import Ed25519Signer

    print_data(Ed25519Signer.create(key).public_key.hex())
    say(f"made the root key {key}; keep it off the coordinator, and keep a copy")


@root.command()
def show(chain: Chain, as_json: AsJson = False) -> None:
    """Show a chain of root metadata, or a draft, and check what of it can be checked."""
    found = _describe(chain)
    if as_json:
        print_json(found)
        return
    for name in ("cluster", "version", "state", "root_sha256", "root_threshold", "roster_threshold"):
        print_data(f"{name.replace('_', ' ')} {found[name]}")
    print_data(f"issued {moment(found['issued'])}, expires {moment(found['expires'])}")
    for kind in ("root_keys", "roster_keys"):
        for value in found[kind]:
            print_data(f"{kind.removesuffix('s').replace('_', ' ')} {value}")
    for value in found["signed_by"]:
        print_data(f"signed by key id {value}")


@root.command()
def rotate(
    chain: Chain,
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the draft goes")],
    root_key: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="public root keys of the new version")
    ] = None,
    threshold: Annotated[int, typer.Option(min=0, max=16, help="root signatures needed; 0: as before")] = 0,
    roster_key: Annotated[
        list[str] | None, typer.Option(metavar="HEX", help="public roster keys of the new version")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="life of the new version")] = 3650,
) -> None:
    """Draft the next version: other keys, or the same for longer."""
    import dataclasses

    from mesh.rootmeta import draft_root, read_root_draft
    from mesh.statefiles import write_atomic

    current = _load_chain(chain)
    now = int(time.time())
    draft = dataclasses.replace(
        current,
        version=current.version + 1,
        root_keys=_keys(root_key) or current.root_keys,
        root_threshold=threshold or (1 if root_key else current.root_threshold),
        roster_keys=_keys(roster_key) or current.roster_keys,
        issued=now,
        expires=now + days * _DAY,
        chain=(),
    )
    envelope = draft_root(draft)
    read_root_draft(envelope)
    write_atomic(out, envelope, mode=0o644)
    say(f"drafted version {draft.version}; have holders of old and new root keys sign it: sealring root sign")


@root.command()
def sign(
    draft: Draft, key: Annotated[Path, typer.Option(metavar="FILE", help="the root key to sign with")]
) -> None:
    """Add a root key's signature to a draft."""
    from mesh.dsse import Ed25519Signer, key_id
    from mesh.rootmeta import cosign_root
    from mesh.statefiles import write_atomic

    signer = Ed25519Signer.load(key)
    write_atomic(draft, cosign_root(_read(draft), signer), mode=0o644)
    print_data(key_id(signer.public_key))


@root.command()
def install(draft: Draft, chain: Chain) -> None:
    """Append a fully signed draft to the coordinator's chain; it counts from the coordinator's next start."""
    from mesh.rootmeta import check_root_times, encode_chain, follow_root
    from mesh.statefiles import write_atomic

    current = _load_chain(chain)
    following = follow_root(_read(draft), current)
    check_root_times(following, now=time.time())
    write_atomic(chain, encode_chain(following.chain), mode=0o644)
    say(f"installed version {following.version}; restart the coordinator")


def _describe(file: Path) -> dict[str, Any]:
    from mesh.errors import RosterError
    from mesh.rootmeta import read_root_draft

    try:
        found = _load_chain(file)
        state, signed_by = "valid chain", read_root_draft(found.chain[-1])[1]
    except RosterError as error:
        if error.reason not in ("ROOT_MALFORMED", "ROOT_CHAIN_LENGTH"):
            raise
        found, signed_by = read_root_draft(_read(file))
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
        "issued": found.issued,
        "expires": found.expires,
        "signed_by": list(signed_by),
    }


def _load_chain(file: Path) -> RootMetadata:
    from mesh.errors import RosterError
    from mesh.rootmeta import decode_chain, follow_root

    found = None
    for envelope in decode_chain(_read(file)):
        found = follow_root(envelope, found)
    if found is None:
        raise RosterError("root metadata chain is empty", reason="ROOT_CHAIN_LENGTH")
    return found


def _read(file: Path) -> bytes:
    from mesh.statefiles import read_bounded

    try:
        return read_bounded(file, max_bytes=_MAX_FILE)
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", reason="BAD_FILE") from None


def _keys(values: list[str] | None) -> tuple[bytes, ...]:
    try:
        keys = tuple(bytes.fromhex(value) for value in values or ())
    except ValueError:
        keys = (b"",)
    if any(len(key) != 32 for key in keys):
        raise InvalidInput(
            "a public key is not 64 hex digits", hint="as `sealring root init` prints it", reason="BAD_KEY"
        )
    return keys
