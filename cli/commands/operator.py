"""`sealring operator`: who else may administer the cluster, and how far."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.calls.operator import Admin, call_admin, read_bundle, run_admin
from sealring.cli.terminal.command import ADMIN, command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, Seconds, cannot_write
from sealring.cli.terminal.output import moment, plain, print_data, print_json, print_table, say, until
from sealring.mesh.errors import AlreadyExists

app = typer.Typer(
    name="operator",
    help="Manage operators, the people and programs that may look at the cluster or change it.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="as it stands in the audit log")]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="where the bundle goes, mode 0700")]
_DAY = 86400
Lifetime = Annotated[
    Seconds, Seconds.option("how long the certificate is good for", least=3600, most=30 * _DAY)
]


class OperatorRole(enum.StrEnum):
    """Look, or look and change."""

    READ = "read"
    ADMIN = "admin"


@command(
    app, example="sealring operator add alice --role read --out alice-bundle", section="cli", fields=ADMIN
)
def add(
    context: typer.Context,
    name: Name,
    role: Annotated[
        OperatorRole, typer.Option(metavar="ROLE", help="read: may look; admin: may do everything")
    ],
    out: Out,
    lifetime: Lifetime = Seconds(30 * _DAY),
    as_json: AsJson = False,
) -> None:
    """Make a bundle for another operator; hand it over by a way that nobody else reads."""
    fields = {"name": name, "role": f"OPERATOR_ROLE_{role.name}", "ttl_seconds": int(lifetime)}
    _make_bundle(context, "AddOperator", fields, out, as_json=as_json)
    say(f"operator {name} may {role} for {lifetime}; use the bundle with --operator {out}")


@command(app, example="sealring operator rotate alice --out alice-bundle-2", section="cli", fields=ADMIN)
def rotate(
    context: typer.Context,
    name: Name,
    out: Out,
    lifetime: Lifetime = Seconds(30 * _DAY),
    as_json: AsJson = False,
) -> None:
    """Make a new bundle for an operator; the old one is refused from then on."""
    fields = {"name": name, "ttl_seconds": int(lifetime)}
    _make_bundle(context, "RotateOperator", fields, out, as_json=as_json)
    say(f"operator {name} has a new bundle in {out}")


@command(app, example="sealring operator revoke alice", section="cli", fields=ADMIN)
def revoke(context: typer.Context, name: Name) -> None:
    """Refuse an operator from now on and end what it has running."""
    call_admin(context, "RevokeOperator", name=name)
    say(f"revoked {name}")


@command(app, "list", example="sealring operator list", section="cli", fields=ADMIN)
def list_operators(context: typer.Context, as_json: AsJson = False) -> None:
    """List the operators; those who were revoked are in the audit log only."""
    answer = call_admin(context, "ListOperators").operators
    found = [{**plain(one), "key_hash": one.key_hash.hex()} for one in answer]
    if as_json:
        print_json(found)
        return
    now = host_of(context).now()
    rows = [
        [one["name"], one["role"], moment(one["added"]), until(one["expires"], now), one["key_hash"][:16]]
        for one in found
    ]
    print_table(["name", "role", "key since", "expires", "key"], rows)


def _make_bundle(
    context: typer.Context, method: str, fields: dict[str, Any], folder: Path, *, as_json: bool
) -> None:
    """Asks for a certificate and writes it with its key, which never leaves this machine.

    Raises AlreadyExists (BUNDLE_EXISTS), InvalidInput (BAD_FILE) before anything is asked.
    """
    from sealring.mesh.member.state import (
        MachineState,
        load_machine_state,
        parse_pem_leaf,
        save_machine_state,
    )
    from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.system.paths import is_enrolled

    if is_enrolled(folder):
        raise AlreadyExists(
            f"there is a bundle or an enrolment in {folder} already",
            hint="name another folder",
            reason="BUNDLE_EXISTS",
        )
    own = read_bundle(load_settings(context).settings.operator)
    leaf = LeafKey()

    async def work(admin: Admin) -> tuple[Any, str]:
        return await admin.call(method, csr=leaf.csr(), **fields), admin.address

    with bundle_folder(folder):
        answer, address = run_admin(context, work)
    root = verify_root_chain(decode_chain(answer.root_metadata), own.root_sha256, now=time.time())
    material = TlsMaterial(leaf.private_pem(), parse_pem_leaf(answer.certificate_chain), root.authorities)
    peer = PeerIdentity(own.peer.cluster, Role.OPERATOR, fields["name"])
    save_machine_state(folder, MachineState(peer, fields["name"], address, own.root_sha256, root, material))
    load_machine_state(folder)
    if as_json:
        print_json({"name": fields["name"], "bundle": str(folder)})
    else:
        print_data(str(folder))


@contextmanager
def bundle_folder(bundle: Path) -> Iterator[None]:
    """The folder is there before anything is asked, and gone again when that is refused."""
    made = [folder for folder in (bundle, *bundle.parents) if not folder.exists()]
    try:
        bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(bundle, error) from None
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
