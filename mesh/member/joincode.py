"""Join codes: seven digits that a person types, which a machine exchanges for a join token.

Both ends run SPAKE2 (`mesh/crypto/spake2.py`) over the code. The coordinator's identity in it is the hash of
its root key, so a code that is typed for one cluster is of no use at another of the same name. The token
comes sealed under the exchange's key, with the root hash and the addresses in it. TLS protects nothing here
that the exchange does not: a server between the two ends sees shares, confirmations and ciphertext.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import encode_base32
from sealring.mesh.crypto.spake2 import Exchange, Party
from sealring.mesh.errors import HandshakeError, InvalidInput
from sealring.mesh.member.bootstrap import MAX_TOKEN_CHARACTERS, JoinToken, find_coordinator
from sealring.mesh.member.introduction import write_first
from sealring.mesh.rpc.reach import patiently
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import joining_channel
from sealring.v1 import membership_pb2, membership_pb2_grpc

DIGITS = 7
_CODE = re.compile(r"[0-9]{7}\Z", re.ASCII)
_BREAKS = re.compile(r"[ -]")
_CONTEXT = b"sealring/v1 join by code"
_NEWCOMER = b"sealring/v1 newcomer"
_COORDINATOR = b"sealring/v1 coordinator\x00"
_TOKEN_KEY = b"sealring/v1 join by code: token"
_NONCE = bytes(12)  # each key seals one token


@dataclass(frozen=True)
class Offer:
    """A cluster that may be joined: the hash of its root key, what it calls itself, and where it answers.

    All of it is a hint from the network until an exchange over the code has succeeded.
    """

    root_sha256: bytes
    name: str
    addresses: tuple[str, ...]


def short_hash(root_sha256: bytes) -> str:
    """The first 40 bits of a root hash, to tell clusters of one name apart on a screen: `abcd-efgh`."""
    text = encode_base32(root_sha256)
    return f"{text[:4]}-{text[4:8]}"


def make_code() -> str:
    """Fresh digits, each code as likely as any other."""
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}}"


def show_code(code: str) -> str:
    """The code as people read it: `123-4567`."""
    return f"{code[:3]}-{code[3:]}"


def parse_code(text: str) -> str:
    """The digits of a code that was typed, with hyphens or blanks or without.

    Raises InvalidInput (BAD_CODE).
    """
    code = _BREAKS.sub("", text[:64].strip())
    if _CODE.match(code) is None:
        raise InvalidInput(
            f"a join code has {DIGITS} digits",
            hint="type the one that `sealring up` or `sealring token code` shows on the first machine",
            reason="BAD_CODE",
        )
    return code


def begin(side: Party, code: str, root_sha256: bytes) -> Exchange:
    """One side of an exchange with the coordinator whose root key has this hash; A is the newcomer."""
    identities = (_NEWCOMER, _COORDINATOR + root_sha256)
    return Exchange(side, code.encode("ascii"), identities, _CONTEXT)


def seal_token(key: bytes, token: str) -> bytes:
    """The join token under the key of a confirmed exchange, which seals nothing else."""
    return _cipher(key).encrypt(_NONCE, token.encode("ascii"), None)


def open_token(key: bytes, sealed: bytes) -> JoinToken:
    """The inverse of `seal_token`. Raises HandshakeError (BAD_ANSWER), InvalidInput (BAD_TOKEN)."""
    if len(sealed) > 2 * MAX_TOKEN_CHARACTERS:
        raise _bad_answer("its token is too long")
    try:
        return JoinToken.parse(_cipher(key).decrypt(_NONCE, sealed, None).decode("ascii"))
    except (InvalidTag, UnicodeDecodeError):
        raise _bad_answer("its token cannot be opened") from None


async def token_for(
    offer: Offer, code: str, *, deadline: float = 10.0, clock: Clock = wall_clock
) -> JoinToken:
    """A join token for one node, from the coordinator that both shows the offer's root key and has this code.

    The first of the offer's addresses with this root key is asked, and only that one: each address that
    hears from a caller with the code could test one guess. It is not called again once it has heard anything.
    Addresses get `deadline` seconds each.

    Raises InvalidInput (BAD_CODE), PermissionDenied (WRONG_CODE), FailedPrecondition (NO_CODE),
    ResourceExhausted (CODE_WAIT, RATE_LIMITED), HandshakeError, and as `find_coordinator`.
    """
    code = parse_code(code)
    address, root = await patiently(
        lambda: find_coordinator(offer.root_sha256, offer.addresses, deadline=deadline, clock=clock)
    )
    async with joining_channel(address, root.authorities) as channel:
        call = membership_pb2_grpc.EnrolmentStub(channel).JoinByCode(timeout=deadline, wait_for_ready=True)
        try:
            token = await _exchange(call, begin(Party.A, code, offer.root_sha256))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
    if token.root_sha256 != offer.root_sha256:
        raise _bad_answer("its token is of another cluster")
    return token


async def _exchange(call: Any, exchange: Exchange) -> JoinToken:
    await write_first(call, membership_pb2.CodeRequest(share=exchange.share))
    agreed = exchange.finish((await _answer(call)).share)
    await write_first(call, membership_pb2.CodeRequest(confirmation=agreed.own_confirmation))
    token = (await _answer(call)).token
    if not agreed.confirmed_by(token.confirmation):
        raise _bad_answer("it does not have the code")
    return open_token(agreed.key, token.sealed)


async def _answer(call: Any) -> membership_pb2.CodeAnswer:
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise _bad_answer("it ends too early")
    assert isinstance(answer, membership_pb2.CodeAnswer)
    return answer


def _cipher(key: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(hashes.SHA512(), 32, None, _TOKEN_KEY).derive(key))


def _bad_answer(what: str) -> HandshakeError:
    return HandshakeError(
        f"what the coordinator answered is refused: {what}",
        hint="another machine may pass itself off as the first one: join with a token",
        reason="BAD_ANSWER",
    )
