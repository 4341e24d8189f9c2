"""Makes a new cluster: keys, certificate authority, root metadata, database and the operator's bundle.

Either in one go, with a root key made here (`init`), or under root keys that never come here: `prepare` makes
everything else and a draft of the root metadata, which their holders sign, and `complete` takes it back.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from sealring.coordinator.auth.operators import MAX_OPERATOR_SECONDS, stored_operator
from sealring.coordinator.keys import (
    OPERATOR_DIR,
    OPERATOR_ID,
    ROOT_KEY,
    ROOT_METADATA,
    ROOT_SECONDS,
    ClusterKeys,
    roster_key_files,
)
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import DATABASE_NAME, OperatorRole, Store
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.dsse import Ed25519Signer
from sealring.mesh.crypto.encoding import encode_base32
from sealring.mesh.errors import AlreadyExists, CertificateError, ConfigError, InvalidInput, RosterError
from sealring.mesh.member.state import MachineState, save_description, save_machine_state, save_root
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role, TlsMaterial, to_pem
from sealring.mesh.pki.root import (
    RootMetadata,
    check_root_times,
    draft_root,
    encode_chain,
    follow_root,
    read_root_draft,
    sign_root,
)
from sealring.mesh.system.files import make_private, read_bounded, unwritable, write_atomic
from sealring.mesh.system.lock import lock_state

ROOT_DRAFT = "root.draft"
_OPERATOR_CSR = "operator_csr"
CA_FILES = ("ca.key", "ca.pem")
_LATER_FILES = (ROOT_KEY, ROOT_METADATA, OPERATOR_DIR, DATABASE_NAME)
_SIDES = ("-journal", "-shm", "-wal")
"""Endings of the files that SQLite keeps beside a database."""


def init(settings: CoordinatorSettings, *, roster_threshold: int = 1, clock: Clock = wall_clock) -> None:
    """Make the state folder of a new cluster, root key included.

    Raises AlreadyExists (STATE_EXISTS) when there is any of it already, ConfigError (STATE_IN_USE,
    STATE_UNWRITABLE), InvalidInput (BAD_THRESHOLD).
    """
    now = clock()
    _check_threshold("roster", roster_threshold, len(roster_key_files(settings)))
    with _whole(settings, state_files(settings)):
        root_signer = Ed25519Signer.create(settings.state_dir / ROOT_KEY)
        draft = _make_keys(settings, (root_signer.public_key,), 1, roster_threshold, now)
        _finish(settings, sign_root(draft, [root_signer]), now)


def prepare(
    settings: CoordinatorSettings,
    root_keys: Sequence[bytes],
    root_threshold: int,
    *,
    roster_threshold: int = 1,
    clock: Clock = wall_clock,
) -> bytes:
    """Make everything but the root's signature; returns the draft that the holders of `root_keys` sign.

    Raises as `init`.
    """
    _check_threshold("roster", roster_threshold, len(roster_key_files(settings)))
    _check_threshold("root", root_threshold, len(set(root_keys)))
    with _whole(settings, state_files(settings)):
        root = _make_keys(settings, tuple(root_keys), root_threshold, roster_threshold, clock())
        draft = draft_root(root)
        read_root_draft(draft)
        write_atomic(settings.state_dir / ROOT_DRAFT, draft, mode=0o644)
    return draft


def complete(settings: CoordinatorSettings, signed: bytes, *, clock: Clock = wall_clock) -> None:
    """Finish what `prepare` began, with the same root metadata, signed.

    Raises ConfigError (NOT_PREPARED, OTHER_ROOT_METADATA, STATE_IN_USE, STATE_UNWRITABLE), AlreadyExists
    (STATE_EXISTS), RosterError (ROOT_*, THRESHOLD_NOT_MET, ENVELOPE_*).
    """
    now = clock()
    folder = settings.state_dir
    try:
        drafted = read_root_draft(read_bounded(folder / ROOT_DRAFT, max_bytes=1 << 17))[0]
    except (FileNotFoundError, RosterError):
        raise ConfigError(
            f"nothing was prepared in {folder} that root metadata could complete",
            hint="begin with: sealring coordinator prepare",
            reason="NOT_PREPARED",
        ) from None
    with _whole(settings, [folder / name for name in _LATER_FILES]):
        if read_root_draft(signed)[0] != drafted:
            raise ConfigError(
                "the root metadata is not what was drafted here",
                hint="have the draft signed that `sealring coordinator prepare` wrote, and nothing else",
                reason="OTHER_ROOT_METADATA",
            )
        root = follow_root(signed, None)
        check_root_times(root, now=now)
        _finish(settings, root, now)
    (folder / ROOT_DRAFT).unlink()


def new_operator(settings: CoordinatorSettings, *, clock: Clock = wall_clock) -> None:
    """Replace the bundle in the state folder by one with a fresh key, whatever became of the old one.

    The coordinator must not run. Raises ConfigError (STATE_*), RosterError (ROOT_EXPIRED).
    """
    store = Store.open(settings.state_dir)
    try:
        keys = ClusterKeys.load(settings, now=clock())
        with store.transaction():
            _make_operator(settings, store, keys, clock())
            store.audit.append(clock(), "coordinator", "new_operator", OPERATOR_ID, {})
    finally:
        store.close()


def renew_operator_bundle(
    folder: Path, store: Store, keys: ClusterKeys, address: str, *, now: float
) -> bytes | None:
    """A new certificate for the key of the folder's own operator, and the current address, in its bundle.

    Each file is replaced as a whole, and they fit the old ones, so a reader in between is never misled.
    Returns the certificate (DER), or None for an operator that was revoked. Raises ConfigError
    (STATE_CORRUPT, STATE_UNWRITABLE).
    """
    known = store.operators.find(OPERATOR_ID)
    if known is None:
        return None
    csr = store.get_meta(_OPERATOR_CSR)
    if csr is None or known.role not in set(OperatorRole):
        raise store.corrupt("it lacks the operator's role or signing request")
    try:
        certificate = _operator_certificate(keys, csr, now)
    except CertificateError:
        raise store.corrupt("the operator's signing request") from None
    store.operators.save(stored_operator(OPERATOR_ID, OperatorRole(known.role), certificate, now))
    try:
        write_atomic(folder / OPERATOR_DIR / "tls.pem", to_pem(certificate))
        save_root(folder / OPERATOR_DIR, keys.root)
        save_description(folder / OPERATOR_DIR, _operator(keys), OPERATOR_ID, address, keys.pin)
    except OSError as error:
        raise unwritable(folder, error) from None
    return certificate


def state_files(settings: CoordinatorSettings) -> list[Path]:
    """Everything that makes a state folder, and roster keys elsewhere."""
    names = (*CA_FILES, ROOT_DRAFT, *_LATER_FILES)
    return [*roster_key_files(settings), *(settings.state_dir / name for name in names)]


def _check_threshold(what: str, threshold: int, keys: int) -> None:
    if not 1 <= threshold <= keys:
        raise InvalidInput(
            f"the {what} threshold is {threshold} and there are {keys} {what} keys",
            hint="name further keys, or lower the threshold",
            reason="BAD_THRESHOLD",
            param=f"{what}_threshold",
        )


@contextmanager
def _whole(settings: CoordinatorSettings, absent: Sequence[Path]) -> Iterator[None]:
    """The folder as of `make_folder`, for this process alone until the end of the block.

    Those of `absent` that the block has made are taken away again if it fails, for example on a full disk: a
    half made folder would refuse to be made anew. Others may meanwhile put files of theirs into the folder.
    Raises as `make_folder`, and Conflict (STATE_IN_USE).
    """
    folder = settings.state_dir
    with lock_state(folder):
        make_folder(settings, absent)
        try:
            yield
        except BaseException:
            for path in (*absent, *(folder / f"{DATABASE_NAME}{end}" for end in _SIDES)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            raise


def make_folder(settings: CoordinatorSettings, absent: Sequence[Path]) -> None:
    """The folder, private, with none of these in it."""
    folder = settings.state_dir
    try:
        make_private(folder, [file.name for file in state_files(settings)])
        found = [file.name for file in absent if file.exists()]
    except OSError as error:
        raise _unwritable(folder, error) from None
    if found:
        raise AlreadyExists(
            f"there is coordinator state in {folder} already ({', '.join(found)})",
            hint=_way_on(folder, found),
            reason="STATE_EXISTS",
        )


def _way_on(folder: Path, found: Collection[str]) -> str:
    if OPERATOR_DIR not in found and {ROOT_METADATA, DATABASE_NAME} <= set(found):
        return (
            f"its operator bundle is gone: sealring coordinator new-operator --state-dir {quote(str(folder))}"
        )
    return "run it, choose another state folder, or move this one aside"


def _make_keys(
    settings: CoordinatorSettings,
    root_keys: tuple[bytes, ...],
    root_threshold: int,
    roster_threshold: int,
    now: float,
) -> RootMetadata:
    """Roster keys and certificate authority, and the root metadata that names them, not signed."""
    folder = settings.state_dir
    cluster = settings.cluster or f"ring-{encode_base32(secrets.token_bytes(5))}"
    try:
        signers = [Ed25519Signer.create(file) for file in roster_key_files(settings)]
        ca = ClusterCA.create(folder, cluster, now=now)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return RootMetadata(
        cluster=cluster,
        version=1,
        root_keys=root_keys,
        root_threshold=root_threshold,
        roster_keys=tuple(signer.public_key for signer in signers),
        roster_threshold=roster_threshold,
        authorities=(ca.certificate,),
        issued=int(now),
        expires=int(now) + ROOT_SECONDS,
    )


def _finish(settings: CoordinatorSettings, root: RootMetadata, now: float) -> None:
    """Root metadata, database and operator bundle, once the keys are there."""
    folder = settings.state_dir
    write_atomic(folder / ROOT_METADATA, encode_chain(root.chain), mode=0o644)
    keys = ClusterKeys.load(settings, now=now)
    try:
        store = Store.create(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        with store.transaction():  # the entry says that all of it is there: see check_stored
            _make_operator(settings, store, keys, now)
            store.audit.append(now, "init", "create_cluster", root.cluster, {"root": keys.pin.hex()})
    finally:
        store.close()


def _make_operator(settings: CoordinatorSettings, store: Store, keys: ClusterKeys, now: float) -> None:
    leaf = LeafKey()
    certificate = _operator_certificate(keys, leaf.csr(), now)
    store.set_meta(_OPERATOR_CSR, leaf.csr())
    store.operators.save(stored_operator(OPERATOR_ID, OperatorRole.ADMIN, certificate, now))
    material = TlsMaterial(leaf.private_pem(), certificate, keys.root.authorities)
    bundle = MachineState(
        _operator(keys), OPERATOR_ID, settings.main_address(), keys.pin, keys.root, material
    )
    save_machine_state(settings.state_dir / OPERATOR_DIR, bundle)


def _operator_certificate(keys: ClusterKeys, csr: bytes, now: float) -> bytes:
    """The certificate of the bundle in the coordinator's folder; it is renewed at half its life."""
    return keys.ca.issue(csr, _operator(keys), lifetime=MAX_OPERATOR_SECONDS, now=now)


def _operator(keys: ClusterKeys) -> PeerIdentity:
    return PeerIdentity(keys.root.cluster, Role.OPERATOR, OPERATOR_ID)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot make the state folder {folder}: {error.strerror}",
        hint="choose a folder that this user can write to",
        reason="STATE_UNWRITABLE",
    )
