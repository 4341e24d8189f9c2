"""`sealring receipt`: what the members of a ring have signed for an answer, checked offline."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson, read_file
from sealring.cli.terminal.output import moment, print_data, print_json, say
from sealring.mesh.errors import InvalidInput
from sealring.mesh.trust.levels import WORDS, TrustLevel

if TYPE_CHECKING:
    from sealring.api.receipts import Answered
    from sealring.mesh.receipt.statement import HeadStatement
    from sealring.mesh.receipt.verify import Known, Proven
    from sealring.mesh.roster.model import Roster

app = typer.Typer(name="receipt", help="What members have signed for an answer.", no_args_is_help=True)

_MAX_FILE = 64 << 20
_MAX_ROSTER = 2 << 20


@command(app, example="sealring receipt verify answer.json --request body.json --root-sha256 HEX")
def verify(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="an answer with its receipt, as JSON")],
    pin: Annotated[str, typer.Option("--root-sha256", metavar="HEX", help="hash of the first root key")],
    request: Annotated[
        Path | None, typer.Option("--request", metavar="FILE", help="the body that was sent, as JSON")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="the answer's text, for a receipt alone"),
    ] = None,
    api: Annotated[
        str,
        typer.Option("--api", metavar="PATH", help="the API that was asked, or 'sealring chat'"),
    ] = "/v1/chat/completions",
    nonce: Annotated[str, typer.Option("--nonce", metavar="HEX", help="the nonce that was sent")] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="deployment that had to answer, or NAME@DIGEST [default: as in --request]",
        ),
    ] = "",
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

    Exits with 14 where --roster does not show whether a member was evicted before the answer ended.
    FILE is the whole answer of the API that --api names, or what a stream's last event has in
    `sealring_receipt`.
    """
    from sealring.api.receipts import parse_body, read_answer, text_digests
    from sealring.client.trust import parse_root_sha256
    from sealring.mesh.receipt.verify import check_together, verify_receipt

    root_hash = parse_root_sha256(pin)
    newer = _newer_roster(later, root, root_hash, host_of(context).now())
    body = None if request is None else parse_body(read_file(request, max_bytes=_MAX_FILE), "the request")
    answered = read_answer(parse_body(read_file(file, max_bytes=_MAX_FILE), "the answer"), api, body)
    if text is not None:
        if answered.choices:
            raise InvalidInput(
                "the answer has its text, and --text gives another",
                hint="give the receipt alone with --text, or the answer without",
                reason="BAD_OPTION",
                param="text",
            )
        answered = replace(answered, choices=[text_digests(_read_text(text))])
    compared = _compared(answered, _nonce(nonce))
    named = model or (str(body.get("model") or "") if body is not None else "")
    proven = []
    for receipt, against in zip(answered.receipts, compared, strict=True):
        one = verify_receipt(receipt, root_hash, against.known, later=newer)
        _check_model(one.statement, named, answered.model)
        proven.append(one)
    check_together(proven)
    pairs = list(zip(proven, compared, strict=True))
    if as_json:
        more = {"api": api, "unsigned": list(answered.unsigned)}
        print_json([_described(one) | {"compared": against.parts} | more for one, against in pairs])
        return
    for one, against in pairs:
        for line in in_words(one, against, named, api, answered.unsigned, newer):
            print_data(line)
    say("the receipt holds")


@dataclass(frozen=True)
class Compared:
    """The facts that one receipt is compared with. `how`: in which way the head has read the request."""

    known: Known
    how: str = ""

    @property
    def parts(self) -> list[str]:
        """The names of what is compared."""
        names = ("nonce", "request", "text", "reasoning", "calls", "order", "finish")
        return [name for name in names if getattr(self.known, name) is not None]


def _compared(answered: Answered, nonce: bytes | None) -> list[Compared]:
    """What to compare each receipt of an answer with: the files' hashes and the nonce, as far as given."""
    from sealring.api.receipts import ChoiceDigests
    from sealring.mesh.receipt.statement import parse_statement
    from sealring.mesh.receipt.verify import Known

    count = len(answered.receipts)
    choices = answered.choices or [ChoiceDigests()] * count
    if len(choices) != count:
        raise InvalidInput(
            f"there is one text, and there are {count} receipts",
            hint="give the whole answer, or its receipts alone",
            reason="BAD_FILE",
        )
    stated = [one.head.statement for one in answered.receipts]
    signed = [parse_statement(one) if one else None for one in stated]
    known = [Known(nonce=nonce, **asdict(choice)) for choice in choices]
    known = [  # heads of protocol 10 have signed for no order
        replace(one, order=one.order if said is None or said.order else None)
        for one, said in zip(known, signed, strict=True)
    ]
    if (asking := answered.asked) is None:
        return [Compared(one) for one in known]
    if len(asking) != count:
        raise InvalidInput(
            f"the request asks for {len(asking)} answers, and there are {count} receipts",
            hint="give the body with which this answer was asked for",
            reason="BAD_FILE",
        )
    compared = []
    for said, one, asked in zip(signed, known, asking, strict=True):
        signed_for = said.request if said is not None else b""
        request = signed_for if signed_for in asked.requests else next(iter(asked.requests))
        known_too = replace(one, request=request, choice=asked.choice)
        compared.append(Compared(known_too, asked.requests[request]))
    return compared


def _check_model(statement: HeadStatement, named: str, answered: str | None) -> None:
    """Requires the model that was asked for. An alias is the gateway's word: it is refused unless `--model`
    says what it means. Raises ReceiptError (RECEIPT_OTHER_MODEL)."""
    from sealring.mesh.errors import ReceiptError
    from sealring.mesh.names import own_name, split_pin

    name, digest = split_pin(named)
    fits = not name or own_name(name, [statement.deployment]) is not None
    if digest:
        fits = fits and digest == statement.model_digest.hex()
    if not fits or answered not in (None, statement.deployment):
        raise ReceiptError(
            f"{statement.deployment} (digest {statement.model_digest.hex()[:16]}...) has signed, and not "
            f"{named if not fits else answered}",
            hint="if the name is an alias, give the deployment that you take it for with --model",
            reason="RECEIPT_OTHER_MODEL",
        )


def _newer_roster(file: Path | None, root: Path | None, root_hash: bytes, now: float) -> Roster | None:
    """The roster in a file, verified by the root metadata in another; None if neither was given."""
    from sealring.mesh.pki.root import decode_chain, verify_root_chain
    from sealring.mesh.roster.codec import issued_unverified
    from sealring.mesh.roster.reader import check_roster

    if file is None and root is None:
        return None
    if file is None or root is None:
        raise InvalidInput(
            "--roster and --root-chain go together",
            hint="give both files, or neither",
            reason="BAD_OPTION",
            param="roster",
        )
    envelope = read_file(file, max_bytes=_MAX_ROSTER)
    chain = decode_chain(read_file(root, max_bytes=_MAX_ROSTER))
    metadata = verify_root_chain(chain, root_hash, now=now)
    return check_roster(envelope, metadata, now=issued_unverified(envelope))


def _read_text(file: Path) -> str:
    try:
        return read_file(file, max_bytes=_MAX_FILE).decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            f"{file} is not UTF-8 text", hint="give the answer's text as it came", reason="BAD_FILE"
        ) from None


def _nonce(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        raise InvalidInput(
            "the nonce is not hexadecimal",
            hint="give it as it was sent in the header sealring-receipt",
            reason="BAD_NONCE",
            param="nonce",
        ) from None


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


def in_words(
    proven: Proven,
    compared: Compared,
    model: str,
    api: str,
    unsigned: tuple[str, ...] = (),
    later: Roster | None = None,
) -> list[str]:
    """What a receipt proves, a sentence a line. `model` is the one that was asked for, "" where none was
    compared; `unsigned` are parts of the answer that were not, `later` the newer roster."""
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
        level = levels[place.id]
        lines.append(f"  {place.id}  layers {low} to {high - 1}, {level}: {WORDS[TrustLevel(level)]} ({who})")
    lines.append(
        f"It was answered by {statement.deployment} (digest {statement.model_digest.hex()[:16]}...), ring "
        f"{statement.ring}, epoch {statement.epoch}, from {moment(statement.opened // 1000)} to "
        f"{moment(statement.finished // 1000)}."
    )
    lines.append(
        "Its model is the one that was asked for."
        if model
        else "Its model was not compared: --request or --model."
    )
    parts = compared.parts
    if "request" in parts:
        lines.append(f"Its request is the one in the file, as {api} reads it{compared.how}.")
    else:
        lines.append("Its request was not compared: --request.")
    named = {"text": "text", "reasoning": "reasoning", "calls": "tool calls"}
    same = [word for name, word in named.items() if name in parts]
    other = [word for name, word in named.items() if name not in parts]
    if same:
        lines.append(
            f"Of its answer {' and '.join(same)} {'is' if same == ['text'] else 'are'} as in the file."
        )
    if "order" in parts:
        lines.append("So is the order of its texts, thoughts and calls.")
    if other:
        lines.append(f"Not compared: its {' and '.join(other)}.")
    if unsigned:
        lines.append(f"Signed by nobody: the answer's {', '.join(unsigned)}.")
    lines.append(
        "Not compared: whether a member was evicted before the answer ended (--roster)."
        if later is None
        else f"No member was evicted before the answer ended, by roster {later.version}."
    )
    if "nonce" not in parts:
        lines.append("The nonce was not compared (--nonce): whoever has the receipt can show it.")
    lines.append(
        "Not proved: that they computed with these weights, or at all; that others were shown the same "
        "roster; that nobody else read it; below the trust level hardware, which machines hold the keys."
    )
    return lines
