"""`sealring chat`: talk to a deployment in the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.calls.completion import completes
from sealring.cli.here.found import cluster_here
from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.host import Host, host_of
from sealring.cli.terminal.options import AsJson, MinTrust, RootHash
from sealring.cli.terminal.output import print_json, printable, say, write
from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.levels import SCORES, TrustLevel, described, level_of

if TYPE_CHECKING:
    from sealring.cli.calls.asking import Question, Target
    from sealring.mesh.settings.config import Loaded

app = typer.Typer()

_MAX_LINE = 1 << 20
_ASK_SECONDS = 3600.0

_sampling = functools.partial(typer.Option, rich_help_panel="Sampling")
"""An option that the gateway bounds."""


@command(
    app,
    example='sealring chat "What is a tail call?"',
    section="cli",
    fields=("operator", "gateway", "gateway_ca", "api_key_file"),
    rich_help_panel="Start",
)
def chat(
    context: typer.Context,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION",
            help="ask this and leave; - reads it from stdin [default: a conversation]",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="deployment [default: the only one]", autocompletion=completes("deployment")
        ),
    ] = "",
    system: Annotated[str, typer.Option(help="the system prompt")] = "",
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="show this picture with the question; may be repeated"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, max=1 << 24, help="longest answer [default: what the context holds]")
    ] = 0,
    min_trust: MinTrust = TrustLevel.NONE,
    root_sha256: RootHash = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="do not seal: the gateway can read the question and the answer")
    ] = False,
    temperature: Annotated[float, _sampling(help="0 to 2; 0 is greedy [default: 0]")] = 0.0,
    top_p: Annotated[
        float | None, _sampling(help="nucleus sampling: smallest set of tokens with this total probability")
    ] = None,
    top_k: Annotated[int | None, _sampling(help="sample from this number of most probable tokens")] = None,
    min_p: Annotated[
        float | None, _sampling(help="tokens with at least this share of the most probable one's probability")
    ] = None,
    seed: Annotated[int | None, _sampling(help="same seed, same answer [default: drawn anew]")] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(help="on the last tokens; 1 is off [default: 1]")
    ] = None,
    repetition_context_size: Annotated[
        int | None, _sampling(help="last tokens that the repetition penalty looks at [default: 20]")
    ] = None,
    presence_penalty: Annotated[float, _sampling(help="-2 to 2, on tokens that occur in the answer")] = 0.0,
    frequency_penalty: Annotated[
        float, _sampling(help="-2 to 2, for each time that a token occurs in it")
    ] = 0.0,
    stop: Annotated[list[str] | None, _sampling(help="end before this text; may be repeated")] = None,
    logprobs: Annotated[
        int | None, _sampling(help="with --json: probabilities of this number of tokens in each place")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a question, or talk line by line; sealed, so that the gateway cannot read it.

    In a conversation Ctrl-C stops an answer, Ctrl-D ends it all, and /help lists the rest. Without
    --gateway it asks the cluster of this machine, your own or a running demo.
    """
    from sealring.cli.calls.asking import Question, read_image
    from sealring.mesh.prompt.options import SamplingOptions

    loaded, host = load_settings(context), host_of(context)
    if logprobs is not None and not as_json:
        raise InvalidInput("--logprobs needs --json", reason="BAD_QUESTION", param="logprobs")
    if clear and root_sha256 is not None:
        raise InvalidInput("--clear checks no cluster, so --root-sha256 has no use", reason="BAD_QUESTION")
    sampling = SamplingOptions(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        repetition_penalty=repetition_penalty,
        repetition_context_size=repetition_context_size,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
    )
    messages = [("system", system)] if system else []
    first = Question(messages, model, max_tokens, SCORES[min_trust], sampling)
    images = [read_image(file) for file in image or ()]
    if question is not None:
        text = _text_of(question)
        target = _target(host, loaded, root_sha256, clear=clear)
        asked = replace(first, messages=[*messages, ("user", (*images, text) if images else text)])
        host.run(_once(host, target, asked, as_json=as_json))
    elif as_json:
        raise InvalidInput("--json needs the question on the command line", reason="BAD_QUESTION")
    else:
        from sealring.cli.calls.asking import asking
        from sealring.cli.calls.conversation import converse

        target = _target(host, loaded, root_sha256, clear=clear)
        opened = host.reach(asking, target, seconds=_ASK_SECONDS)
        converse(target, opened, first, write_piece, images)


def _text_of(question: str) -> str:
    """The question itself, or what is on stdin in place of `-`. Raises InvalidInput (BAD_QUESTION)."""
    if question == "-":
        question = sys.stdin.read(_MAX_LINE + 1)
        if len(question) <= _MAX_LINE:  # else it is cut, and would be a shorter question without its blanks
            question = question.strip()
    if not question or len(question) > _MAX_LINE:
        raise InvalidInput("the question is empty or too long", reason="BAD_QUESTION", param="question")
    return question


def write_piece(text: str) -> None:
    """Shows a piece of an answer as it comes; what could steer the terminal is left out."""
    write(printable(text, keep="\n\t", instead=""))


async def _once(host: Host, target: Target, asked: Question, *, as_json: bool) -> None:
    from sealring.cli.calls.asking import asking

    async with host.reach(asking, target, seconds=_ASK_SECONDS) as asker:
        answer = await asker.ask(asked, (lambda text: None) if as_json else write_piece)
    if as_json:
        shown = {name: value for name, value in asdict(answer).items() if name != "text"}
        print_json({"answer": answer.text, **shown, "min_trust": level_of(answer.min_trust)})
        return
    write_piece("\n")
    speed = f"{answer.ttft_s:.2f} s to the first, {answer.tok_s:.0f} per second"
    way = f"sealed, trust {described(answer.min_trust)}" if answer.sealed else "in clear"
    say(f"({answer.completion_tokens} tokens, {speed}; {way}{_receipt(answer.sealring_receipt)})")


def _receipt(receipt: Mapping[str, Any]) -> str:
    """Whether the members that answered have signed for it, in words."""
    from sealring.mesh.receipt.form import receipts_of
    from sealring.mesh.receipt.statement import parse_statement

    if not receipt:
        return ""
    parts = [part for choice in receipt["choices"] for part in (choice["head"], choice.get("tail", {}))]
    reasons = [part["missing"] for part in parts if "missing" in part]
    if reasons:
        return f", without a receipt ({reasons[0]})"
    given = sum(parse_statement(one.head.statement).given for one in receipts_of(receipt))
    return ", with a receipt" + f" for all but its first {given} tokens" * bool(given)


def _target(host: Host, loaded: Loaded[Any], root_sha256: str | None, *, clear: bool) -> Target:
    """The gateways to ask, and the root key to check them against.

    Raises ConfigError, and what `root_pin` raises.
    """
    from sealring.cli.calls.asking import ASK_CLEAR, Target
    from sealring.cli.calls.gateway import NO_ACCESS, gateway_access
    from sealring.cli.calls.pin import root_pin, roster_file

    addresses = loaded.settings.gateway
    member = cluster_here().member if loaded.origin["gateway"] == "default" else None
    access = NO_ACCESS if member else gateway_access(loaded)
    if clear:
        here = (one for one in addresses if host.listens(*parse_address(one)))
        return Target([next(here, addresses[0])], access, None, member=member)
    try:
        pin = root_pin(root_sha256, loaded)
    except ConfigError as error:
        if error.reason == "NO_ROOT_HASH":
            error.hint += f"; {ASK_CLEAR}"
        raise
    return Target(addresses, access, pin, roster_file(pin, addresses), member)
