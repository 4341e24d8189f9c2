"""`sealring demo` and `sealring up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exit_codes
from cli.command import command
from cli.commands.chat import write_piece
from cli.commands.deployment import default_name, parse_split
from cli.leftovers import PORTS, temporary_folder
from cli.local_output import QUESTION, describe, print_ring, print_ways, report
from cli.output import Progress, print_json, progress, say
from cli.words import AsJson
from mesh.errors import ConfigError, InvalidInput, ModelError

if TYPE_CHECKING:
    from cli.client import Answer
    from cli.cluster import LocalCluster

app = typer.Typer()

_MAX_QUESTION = 4096
_ASK_SECONDS = 120.0

Nodes = Annotated[int, typer.Option(min=1, max=64, help="nodes, each a daemon of its own")]


@command(app, example="sealring demo --once", rich_help_panel="Start")
def demo(
    once: Annotated[bool, typer.Option("--once", help="leave after the answer")] = False,
    as_json: AsJson = False,
    nodes: Nodes = 3,
    question: Annotated[str, typer.Option(help="what the model is asked")] = QUESTION,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="keep the state here [default: a temporary folder]")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="[default: the bundled model]")] = None,
) -> None:
    """Run all of it here and ask a question.

    A coordinator, nodes and a gateway as processes of their own, a sealed ring over the bundled model, one
    question, its answer. Serves until Ctrl-C, which leaves no process, and no file outside the state folder.
    """
    if not question.strip() or len(question) > _MAX_QUESTION:
        raise InvalidInput("the question is empty or too long", reason="BAD_QUESTION", param="question")
    folder = demo_model() if model is None else model_folder(model)
    name = "demo" if model is None else default_name(str(folder))

    async def work(cluster: LocalCluster, shown: Progress) -> None:
        began = time.monotonic()
        await cluster.start()
        deployment = await cluster.deploy(stages=nodes)
        shown.close()
        ready = time.monotonic() - began
        answer = await _ask(cluster, question, quiet=as_json)
        first = answer.ttft_s
        say(f"(first token {ready + first:.1f} s after the start, {first:.2f} s after the question)")
        if as_json:
            print_json(report(answer, deployment))
            return
        print_ring(deployment)
        if not once:
            print_ways(cluster)

    with state_folder(state) as chosen:
        run_cluster(chosen, str(folder), nodes, name, work, serve=not once)


@command(app, example="sealring up ~/models/Qwen3-8B", rich_help_panel="Start")
def up(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="model folder")],
    nodes: Nodes = 3,
    state: Annotated[Path, typer.Option(metavar="DIR", help="keep the state here")] = Path("state"),
    name: Annotated[
        str | None, typer.Option(help="what clients call it [default: the folder's name]")
    ] = None,
    tokens: Annotated[int, typer.Option("--context", min=0, max=1 << 24, help="tokens; 0: the model's")] = 0,
    split: Annotated[str, typer.Option(metavar="A,B,...", help="layers per node, by hand")] = "",
    max_rows: Annotated[int, typer.Option(min=0, max=1 << 16, help="sequences at once")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a model from a local cluster.

    Until Ctrl-C; started with the same state folder again, it is the same cluster.
    """
    folder = model_folder(Path(model))
    sizes = parse_split(split)
    spec: dict[str, Any] = {"context": tokens, "max_rows": max_rows}
    spec |= {"split": sizes} if sizes else {"stages": nodes}

    async def work(cluster: LocalCluster, shown: Progress) -> None:
        await cluster.start()
        deployment = await cluster.deploy(**spec)
        shown.close()
        if as_json:
            print_json(describe(cluster, deployment))
        else:
            print_ring(deployment)
            print_ways(cluster)

    with state_folder(state) as chosen:
        run_cluster(chosen, str(folder), nodes, name or default_name(str(folder)), work, serve=True)


def demo_model() -> Path:
    """The bundled model, as installed or in the checkout. Raises ModelError (NO_DEMO_MODEL)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "demo_model", package.parent / "examples" / "demo_model" / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(
        "the bundled demo model is not here",
        hint="install it again, or name a model folder with --model",
        reason="NO_DEMO_MODEL",
    )


def model_folder(path: Path) -> Path:
    """The folder, if it looks like a model. Raises ModelError (MODEL_NOT_FOUND)."""
    folder = path.expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json",
            hint="name a folder with config.json, tokenizer and safetensors files",
            reason="MODEL_NOT_FOUND",
        )
    return folder


@contextmanager
def state_folder(chosen: Path | None) -> Iterator[Path]:
    """The chosen folder, or a temporary one that goes away again. Raises ConfigError (BAD_STATE_FOLDER)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as exceptions, until the event loop takes them over
        signal.signal(number, _leave)
    if chosen is None:
        with temporary_folder() as folder:
            yield folder
        return
    foreign = chosen.is_dir() and any(chosen.iterdir()) and not (chosen / PORTS).exists()
    if foreign or (chosen.exists() and not chosen.is_dir()):
        raise ConfigError(
            f"{chosen} is not empty and holds no local cluster",
            hint="name a new folder with --state",
            reason="BAD_STATE_FOLDER",
        )
    yield chosen


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def run_cluster(
    state: Path,
    model: str,
    nodes: int,
    name: str,
    work: Callable[[LocalCluster, Progress], Coroutine[Any, Any, None]],
    *,
    serve: bool,
) -> None:
    """Runs `work` over a local cluster, which then serves on if it shall.

    SIGINT, SIGTERM and SIGHUP end it in order; while it serves that is its normal end.
    """
    caught: list[int] = []
    serving = False

    async def run() -> None:
        nonlocal serving
        from cli.cluster import LocalCluster

        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop(number: int) -> None:
            caught.append(number)
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        with progress("starting a local cluster") as shown:
            async with LocalCluster(state, model, nodes=nodes, name=name, say=shown.update) as cluster:
                await work(cluster, shown)
                if serve:
                    serving = True
                    await cluster.wait_for_end()
                say("stopping")

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        say("stopped")
        if serving:
            return
        interrupted = not caught or caught[0] == signal.SIGINT
        raise typer.Exit(exit_codes.INTERRUPTED if interrupted else 128 + caught[0]) from None


async def _ask(cluster: LocalCluster, question: str, *, quiet: bool) -> Answer:
    from cli.client import Question, inference

    say(f"\n> {question}")
    async with inference(cluster.grpc_address) as client:
        asked = Question([("user", question)], cluster.name)
        answer = await client.ask(asked, (lambda text: None) if quiet else write_piece, seconds=_ASK_SECONDS)
    if not quiet:
        write_piece("\n")
    return answer
