"""`sealring chat`: talk to a deployment in the terminal."""

from __future__ import annotations

import asyncio
import functools
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.local.leftovers import gateway_of, running
from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.options import AsJson, MinTrust
from sealring.cli.terminal.output import print_json, printable, say, write
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.addresses import listens, parse_address
from sealring.mesh.system.paths import default_state_root
from sealring.mesh.trust.levels import SCORES, TrustLevel, level_of

if TYPE_CHECKING:
    from sealring.cli.calls.client import Access, Question
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
    fields=("gateway", "gateway_ca", "api_key_file"),
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
    model: Annotated[str, typer.Option(metavar="NAME", help="deployment [default: the only one]")] = "",
    system: Annotated[str, typer.Option(help="what the model is told first")] = "",
    max_tokens: Annotated[
        int, typer.Option(min=0, max=1 << 24, help="longest answer [default: what the context holds]")
    ] = 0,
    min_trust: MinTrust = TrustLevel.NONE,
    temperature: Annotated[float, _sampling(help="0 to 2; 0 is greedy [default: 0]")] = 0.0,
    top_p: Annotated[
        float | None, _sampling(help="nucleus sampling: smallest set of tokens with this total probability")
    ] = None,
    top_k: Annotated[int | None, _sampling(help="so many most probable tokens")] = None,
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
        int | None, _sampling(help="with --json: probabilities of so many tokens in each place")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a question, or talk line by line.

    In a conversation Ctrl-C stops an answer, Ctrl-D ends it all, and /help lists the rest. Without
    --gateway it asks your own `sealring up`, else who is at the default address, else a running demo.
    """
    from sealring.cli.calls.client import Question
    from sealring.client.options import SamplingOptions

    loaded = load_settings(context)
    if logprobs is not None and not as_json:
        raise InvalidInput("--logprobs needs --json", reason="BAD_QUESTION", param="logprobs")
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
    if question == "-":
        question = sys.stdin.read(_MAX_LINE + 1)
        if len(question) <= _MAX_LINE:  # else it is cut, and would be a shorter question without its blanks
            question = question.strip()
    if question is not None:
        if not question or len(question) > _MAX_LINE:
            raise InvalidInput("the question is empty or too long", reason="BAD_QUESTION", param="question")
        asyncio.run(_once(_gateway(loaded), first, question, as_json=as_json))
    elif as_json:
        raise InvalidInput("--json needs the question on the command line", reason="BAD_QUESTION")
    else:
        from sealring.cli.calls.conversation import converse

        converse(*_gateway(loaded), first, write_piece, seconds=_ASK_SECONDS)


def write_piece(text: str) -> None:
    """Shows a piece of an answer as it comes; what could steer the terminal is left out."""
    write(printable(text, keep="\n\t", instead=""))


async def _once(gateway: tuple[str, Access], base: Question, question: str, *, as_json: bool) -> None:
    from sealring.cli.calls.client import inference

    address, access = gateway
    async with inference(address, **access) as client:
        asked = replace(base, messages=[*base.messages, ("user", question)])
        answer = await client.ask(
            asked, (lambda text: None) if as_json else write_piece, seconds=_ASK_SECONDS
        )
    if as_json:
        shown = {name: value for name, value in asdict(answer).items() if name != "text"}
        print_json({"answer": answer.text, **shown, "min_trust": level_of(answer.min_trust)})
        return
    write_piece("\n")
    speed = f"{answer.ttft_s:.2f} s to the first, {answer.tok_s:.0f} per second"
    say(f"({answer.completion_tokens} tokens, {speed})")


def _gateway(loaded: Loaded[Any]) -> tuple[str, Access]:
    """Whom to talk to, and how: the gateway of the settings; by default that of this user's `up`, else who is
    at the default address, else the demo that runs."""
    from sealring.cli.calls.client import gateway_access

    addresses: list[str] = loaded.settings.gateway
    address = next((one for one in addresses if listens(*parse_address(one))), addresses[0])
    if loaded.origin["gateway"] != "default":
        return address, gateway_access(loaded.settings)
    found = {folder: gateway for folder in running() if (gateway := gateway_of(folder)) is not None}
    own = found.get(default_state_root())
    if own is not None:  # at the default address there may be another user's
        return own, gateway_access(loaded.settings)
    if listens(*parse_address(address)):
        return address, gateway_access(loaded.settings)
    if len(found) > 1:
        raise InvalidInput(
            f"{len(found)} local clusters run here",
            hint=f"name one: --gateway {' or '.join(found.values())}",
            reason="WHICH_GATEWAY",
        )
    for folder, gateway in found.items():
        say(f"nobody is at {address}; found the local cluster in {folder}")
        return gateway, {"credentials": None, "api_key": None}
    return address, gateway_access(loaded.settings)
