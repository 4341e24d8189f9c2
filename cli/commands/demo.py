"""`sealring demo`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.commands.chat import write_piece
from sealring.cli.commands.deployment import default_name
from sealring.cli.here.leftovers import announced, temporary_folder
from sealring.cli.here.settings_files import PORTS
from sealring.cli.local.foreground import run_cluster, signals_as_exceptions
from sealring.cli.local.output import PICTURE_QUESTION, QUESTION, print_ring, print_ways, report
from sealring.cli.terminal.command import command
from sealring.cli.terminal.host import Host, host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import Progress, print_json, progress, say
from sealring.mesh.errors import ConfigError, InvalidInput, ModelError
from sealring.mesh.system.extras import vision_installed

if TYPE_CHECKING:
    from sealring.cli.calls.asking import TimedAnswer
    from sealring.cli.local.cluster import LocalCluster
    from sealring.client.question import Content

app = typer.Typer()

_MAX_QUESTION = 4096
_ASK_SECONDS = 120.0

Nodes = Annotated[int, typer.Option(min=1, max=64, help="nodes, each a daemon of its own")]


@command(app, example="sealring demo --once", rich_help_panel="Start")
def demo(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="leave after the answer")] = False,
    as_json: AsJson = False,
    nodes: Nodes = 3,
    question: Annotated[str, typer.Option(help="what the model is asked")] = QUESTION,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="keep the state here [default: a temporary folder]")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="[default: the bundled model]")] = None,
) -> None:
    """Run a whole cluster on this machine and ask a question.

    A coordinator, nodes and a gateway as processes of their own, a sealed ring over the bundled model, one
    question, its answer. Where sealring[vision] is installed, a second ring with the bundled model that sees
    answers a question about a picture. Serves until Ctrl-C, which leaves no process, and no file outside the
    state folder.
    """
    if not question.strip() or len(question) > _MAX_QUESTION:
        raise InvalidInput("the question is empty or too long", reason="BAD_QUESTION", param="question")
    from sealring.cli.local.cluster import LocalCluster
    from sealring.node.models.folders import VISION, bundled_model

    host = host_of(context)
    folder = bundled_model() if model is None else model_folder(model)
    name = "demo" if model is None else default_name(str(folder))
    sees = model is None and not as_json and vision_installed()

    async def work(cluster: LocalCluster, shown: Progress) -> None:
        began = host.monotonic()
        await cluster.start()
        deployment = await cluster.deploy(stages=nodes)
        shown.close()
        ready = host.monotonic() - began
        say(f"\n> {question}")
        answer = await _ask(host, cluster, name, question, quiet=as_json)
        first = answer.ttft_s
        say(f"(first token {ready + first:.1f} s after the start, {first:.2f} s after the question)")
        if as_json:
            print_json(report(answer, deployment))
            return
        if sees:
            seeing = bundled_model(VISION)
            with progress(f"planning {VISION}") as again:
                await cluster.deploy(again.update, stages=nodes, name=VISION, model=str(seeing))
            picture = seeing / "shapes.png"
            say(f"\n> {PICTURE_QUESTION} ({picture})")
            await _ask(host, cluster, VISION, (picture.read_bytes(), PICTURE_QUESTION), quiet=False)
        print_ring(deployment)
        if not once:
            print_ways(cluster, deployment)

    with state_folder(host, state_dir) as chosen:

        def make(say: Callable[[str], None]) -> LocalCluster:
            return host.reach(LocalCluster, chosen, folder, nodes=nodes, name=name, say=say)

        run_cluster(host, make, work, what="starting a local cluster", serve=not once)


def model_folder(path: Path) -> Path:
    """The folder, if it looks like a model. Raises ModelError (MODEL_NOT_FOUND)."""
    folder = Path(os.path.expanduser(path)).absolute()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json",
            hint="name a folder with config.json, tokenizer and safetensors files",
            reason="MODEL_NOT_FOUND",
        )
    return folder


@contextmanager
def state_folder(host: Host, chosen: Path | None) -> Iterator[Path]:
    """The chosen folder, or a temporary one that goes away again. Raises ConfigError (BAD_STATE_FOLDER)."""
    signals_as_exceptions()
    if chosen is None:
        with temporary_folder(host.now) as folder:
            yield folder
        return
    foreign = chosen.is_dir() and any(chosen.iterdir()) and not (chosen / PORTS).exists()
    if foreign or (chosen.exists() and not chosen.is_dir()):
        raise ConfigError(
            f"{chosen} is not empty and holds no local cluster",
            hint="name a new folder with --state-dir",
            reason="BAD_STATE_FOLDER",
        )
    with announced(chosen, host.now):
        yield chosen


async def _ask(
    host: Host, cluster: LocalCluster, name: str, question: Content, *, quiet: bool
) -> TimedAnswer:
    from sealring.cli.calls.asking import Question, Target, asking
    from sealring.cli.calls.operator import read_bundle

    pin = read_bundle(cluster.operator_bundle).root_sha256
    target = Target([cluster.grpc_address], {"credentials": None, "api_key": None}, pin)
    async with host.reach(asking, target, seconds=_ASK_SECONDS) as asker:
        asked = Question([("user", question)], name)
        answer = await asker.ask(asked, (lambda text: None) if quiet else write_piece)
    if not quiet:
        write_piece("\n")
    return answer
