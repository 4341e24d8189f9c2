"""`sealring receipt`: what the members of a ring have signed for an answer, checked offline."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command
from sealring.cli.terminal.options import AsJson, read_file
from sealring.cli.terminal.output import moment, print_data, print_json, say
from sealring.mesh.errors import InvalidInput

if TYPE_CHECKING:
    from sealring.mesh.receipt.verify import Proven

app = typer.Typer(name="receipt", help="What members have signed for an answer.", no_args_is_help=True)

_MAX_FILE = 64 << 20


@command(app, example="sealring receipt verify answer.json --request body.json --root-sha256 HEX")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="an answer with its receipt, as JSON")],
    pin: Annotated[str, typer.Option("--root-sha256", metavar="HEX", help="hash of the first root key")],
    request: Annotated[
        Path | None, typer.Option("--request", metavar="FILE", help="the body that was sent, as JSON")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="the answer's text, for a receipt alone"),
    ] = None,
    nonce: Annotated[str, typer.Option("--nonce", metavar="HEX", help="the nonce that was sent")] = "",
    later: Annotated[
        Path | None,
        typer.Option("--roster", metavar="FILE", help="a newer signed roster: who was revoked meanwhile"),
    ] = None,
    root: Annotated[
        Path | None, typer.Option("--root-chain", metavar="FILE", help="the root metadata of that roster")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check an answer's receipt from files and a root key's hash alone, and say what it proves.

    FILE is the whole answer of any of the APIs, or what a stream's last event has in `sealring_receipt`.
    """
    from sealring.api.receipts import Told, parse_body, read_answer, text_told
    from sealring.client.trust import parse_root_sha256
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.receipt.verify import Known, verify_receipt
    from sealring.mesh.roster.codec import issued_unverified
    from sealring.mesh.roster.reader import check_roster

    if (later is None) != (root is None):
        raise InvalidInput("--roster and --root-chain go together", reason="BAD_OPTION", param="roster")
    root_hash = parse_root_sha256(pin)
    answered = read_answer(parse_body(read_file(file, max_bytes=_MAX_FILE), "the answer"))
    requests: list[bytes | None] = [None] * len(answered.receipts)
    if request is not None:
        body = parse_body(read_file(request, max_bytes=_MAX_FILE), "the request")
        requests = [*answered.requests(body)]
        if len(requests) != len(answered.receipts):
            raise InvalidInput("the request asks for another number of answers", reason="BAD_FILE")
    choices = answered.choices
    if text is not None:
        choices = [text_told(read_file(text, max_bytes=_MAX_FILE).decode())]
    newer = None
    if later is not None and root is not None:
        envelope = read_file(later, max_bytes=2 << 20)
        metadata = verify_root_chain(
            decode_chain(read_file(root, max_bytes=2 << 20)), root_hash, now=time.time()
        )
        newer = check_roster(envelope, metadata, now=issued_unverified(envelope))
    proven = []
    for place, receipt in enumerate(answered.receipts):
        told = choices[place] if place < len(choices) else Told()
        known = Known(
            nonce=_nonce(nonce),
            request=requests[place],
            text=told.text,
            reasoning=told.reasoning,
            calls=told.calls,
            finish=told.finish,
        )
        proven.append(verify_receipt(receipt, root_hash, known, later=newer))
    if as_json:
        print_json([_described(one) for one in proven])
        return
    for one in proven:
        for line in in_words(one, request=request is not None, answer=bool(choices), nonce=bool(nonce)):
            print_data(line)
    say("the receipt holds")


def _nonce(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        raise InvalidInput("the nonce is not hexadecimal", reason="BAD_NONCE", param="nonce") from None


def _described(proven: Proven) -> dict[str, Any]:
    statement = proven.statement
    return {
        "cluster": statement.cluster,
        "roster_version": statement.roster_version,
        "ring": statement.ring,
        "epoch": statement.epoch,
        "deployment": statement.deployment,
        "model_digest": statement.model_digest.hex(),
        "choice": statement.choice,
        "nonce": statement.nonce.hex(),
        "request": statement.request.hex(),
        "text": statement.text.hex(),
        "tokens": statement.tokens,
        "given": statement.given,
        "earlier": [asdict(one) for one in statement.earlier],
        "opened": statement.opened / 1000,
        "finished": statement.finished / 1000,
        "members": [
            {"id": place.id, "layers": place.layers, "level": proven.levels[place.id], "trust": place.trust}
            for place in statement.members
        ],
    }


def in_words(proven: Proven, *, request: bool, answer: bool, nonce: bool) -> list[str]:
    """What a receipt proves, a sentence a line. The flags say what it was held against."""
    statement, levels = proven.statement, proven.levels
    head, tail = statement.members[0], statement.members[-1]
    both = "The head has" if head == tail else "The head and the tail have"
    lines = [
        f"{both} signed for this answer with the keys that roster {statement.roster_version} of cluster "
        f"{statement.cluster} names:"
    ]
    for place in statement.members:
        who = "head" if place is head else "tail" if place is tail else "between them, signed nothing"
        low, high = place.layers
        lines.append(f"  {place.id}  layers {low} to {high - 1}, {LEVELS[levels[place.id]]} ({who})")
    lines.append(
        f"It was answered by {statement.deployment} (digest {statement.model_digest.hex()[:16]}...), ring "
        f"{statement.ring}, epoch {statement.epoch}, from {moment(statement.opened // 1000)} to "
        f"{moment(statement.finished // 1000)}."
    )
    if statement.given:
        named = ", ".join(
            f"epoch {one.epoch or 'unknown'} (to token {one.tokens})" for one in statement.earlier
        )
        lines.append(
            f"The first {statement.given} of its {statement.tokens} tokens are of earlier epochs, which have "
            f"signed nothing: {named or 'not named'}."
        )
    lines.append(
        "Its request is the one in the file." if request else "The request was not compared: --request."
    )
    lines.append("Its answer is the one in the file." if answer else "The answer was not compared.")
    if not nonce:
        lines.append("The nonce was not compared (--nonce): whoever has the receipt can show it.")
    lines.append(
        "Not proved: that they computed with these weights, or at all; that nobody else read it; below the "
        "trust level hardware, which machines hold the keys."
    )
    return lines


LEVELS = {
    "none": "no trust",
    "software": "software: a key in a file",
    "self_signed": "self_signed: it claims an enclave, which nobody has checked",
    "hardware": "hardware: the manager of a Mac vouches for the key",
}
"""Trust levels in words."""
