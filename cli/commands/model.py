"""`sealring model`: what a model needs, and whether it can be cut into stages."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.calls.completion import completes
from sealring.cli.calls.held import print_models, pull, remove
from sealring.cli.calls.operator import call_admin, run_admin
from sealring.cli.commands.deployment import parse_split
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import plain, print_json, print_table, progress, say
from sealring.mesh.errors import ConfigError, InvalidInput, ModelError, PermissionDenied, Unavailable
from sealring.mesh.ring.limits import MAX_CONTEXT
from sealring.mesh.units import size

app = typer.Typer(
    name="model", help="Models: where they are, what they need, how they split.", no_args_is_help=True
)

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="hub id, or a folder's name on another node",
        autocompletion=completes("model"),
    ),
]
_LONG_SECONDS = 20.0
"""For which a check computes a long prompt with the whole model; the stages take as long again."""

Adapter = Annotated[str, typer.Option(metavar="FOLDER", help="of an adapter by which the model is tuned")]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", metavar="NODE", help="may be repeated", autocompletion=completes("node")),
]


@command(app, "pull", example="sealring model pull mlx-community/Qwen3-8B-4bit", section="cli", fields=ADMIN)
def pull_model(
    context: typer.Context,
    model: ModelName,
    node: Nodes = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it is there")] = True,
) -> None:
    """Have a node fetch a model: from a node that has it, else from the Hugging Face hub.

    Without --node one node fetches it; those that are to serve it get it from there when it is deployed.
    """
    with progress(f"fetching {model}") as shown:
        names = run_admin(context, lambda admin: pull(admin, model, node or [], shown.update, wait=wait))
    say(f"{model} is {'on' if wait else 'on its way to'} {', '.join(names)}")


@command(app, "search", example="sealring model search qwen3 coder")
def search(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="of the model's name")],
    every: Annotated[bool, typer.Option("--all", help="also models not converted for MLX")] = False,
    limit: Annotated[int, typer.Option(min=1, max=50, help="models at most")] = 20,
    as_json: AsJson = False,
) -> None:
    """Find models on the Hugging Face hub, those most fetched first."""
    from sealring.cli.local.hubbed import find_models

    with progress("asking the Hugging Face hub"):
        found = host_of(context).reach(find_models, " ".join(words), limit=limit, mlx_only=not every)
    if as_json:
        print_json(found)
        return
    print_table(["model", "fetched", "likes"], [[one["id"], one["downloads"], one["likes"]] for one in found])
    say("fetch one: sealring model pull MODEL; in fewer bits: sealring model get MODEL --bits 4")


@command(app, "get", example="sealring model get Qwen/Qwen3-8B --bits 4")
def get(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="ORG/NAME", help="hub id, or a name of `model fits`")],
    bits: Annotated[int, typer.Option(min=2, max=8, metavar="2|3|4|5|6|8", help="of each weight")] = 4,
    into: Annotated[Path | None, typer.Option(metavar="DIR", help="its folder [default: ~/models]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep the model as published, too")] = False,
) -> None:
    """Fetch a model to this machine, and write it in fewer bits as mlx_lm.convert does.

    For models that nobody has converted. It needs the disk for both, and reads text alone.
    """
    from sealring.cli.fitting.known import hub_id
    from sealring.cli.local.hubbed import check_bits, fetch_here
    from sealring.mesh.system.pace import FETCHING, Pace
    from sealring.node.engine.apart import ask_apart

    check_bits(bits)
    model = hub_id(model) or model
    host, folder = host_of(context), (into or Path("~/models")).expanduser().resolve()
    made, pace = folder / f"{model.rpartition('/')[2]}-{bits}bit", Pace(host.monotonic)
    with progress(f"fetching {model}") as shown:

        def tell(before: float, what: str, done: int, total: int) -> None:
            reached = pace.at(what, done, total)
            shown.update(f"{model}: {math.floor(50 * (before + reached.share))} %, {reached.words}")

        fetched = host.reach(fetch_here, model, folder, partial(tell, 0, FETCHING))
        converting = f"converting to {bits} bits"
        shown.update(f"{model}: 50 %, {converting}")
        command = [str(fetched), str(made), "--bits", str(bits)]
        written = host.reach(ask_apart, "sealring.node.engine.convert", command, partial(tell, 1, converting))
    if not keep:
        shutil.rmtree(fetched)
    say(f"{made} has {size(written['bytes'])}; serve it: sealring deploy {made}")


@command(app, "list", example="sealring model list", section="cli", fields=ADMIN)
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """Show which nodes have which models, and how far those are that are on their way."""
    nodes = plain(call_admin(context, "ListNodes"))["nodes"]
    if as_json:
        print_json(
            [
                {"node": node["name"], "id": node["id"], "models": node["heartbeat"]["models"]}
                for node in nodes
            ]
        )
        return
    print_models(nodes)


@command(app, "rm", example="sealring model rm Qwen3-8B", section="cli", fields=ADMIN, hidden=True)
@command(
    app, "remove", example="sealring model remove mlx-community/Qwen3-8B-4bit", section="cli", fields=ADMIN
)
def remove_model(context: typer.Context, model: ModelName, node: Nodes = None) -> None:
    """Delete a model from the nodes that have fetched it, or stop fetching it.

    Folders that a node's owner put there stay, and those of other programs, whose links go.
    """
    names = run_admin(context, lambda admin: remove(admin, model, node or []))
    say(f"removed {model} from {', '.join(names)}")


@command(app, example="sealring model fits --memory 64,36,16", section="cli", fields=ADMIN)
def fits(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="one of the list, or a folder [default: all]",
            autocompletion=completes("listed model"),
        ),
    ] = "",
    memory: Annotated[
        str,
        typer.Option(metavar="GB,...", help="of each Mac [default: the cluster's nodes, or this machine]"),
    ] = "",
    chip: Annotated[
        str, typer.Option(metavar="CHIP,...", help="of each Mac, as m4max [default: likely with its memory]")
    ] = "",
    bits: Annotated[int, typer.Option(min=0, max=16, metavar="4|6|8|16", help="of each weight")] = 0,
    tokens: Annotated[
        int,
        typer.Option(
            "--context", min=0, max=MAX_CONTEXT, metavar="TOKENS", help="has to fit [default: what does]"
        ),
    ] = 0,
    every: Annotated[bool, typer.Option("--all", help="also models that do not fit")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which well-known models fit, on how many Macs, and about how fast.

    Needs neither a cluster nor a network: models come from a list, rates from a cost model.
    """
    from sealring.cli.fitting.known import WIDTHS
    from sealring.cli.fitting.machines import parse_memory
    from sealring.cli.fitting.showing import fit_of, fits_of, print_fits

    if bits not in (0, *WIDTHS):
        widths = ", ".join(map(str, WIDTHS))
        raise InvalidInput(f"--bits is {bits}", hint=f"one of {widths}", reason="BAD_BITS", param="bits")
    where, macs = ("as given", parse_memory(memory, chip)) if memory else _machines(context)
    listed = not (model and (path := Path(model).expanduser()).is_dir())
    if not listed:
        found = [fit_of(macs, path.resolve().name, _measured(context, path, ""), tokens)]
    else:
        found = fits_of(macs, model, bits, tokens)
    print_fits(found, macs, where, listed=listed, every=every or bool(model), as_json=as_json)


def _machines(context: typer.Context) -> tuple[str, list[Any]]:
    """The cluster's nodes that are online, else this machine; with a word for which."""
    from sealring.cli.fitting.machines import mac_of, own_mac
    from sealring.v1 import admin_pb2

    try:
        nodes = call_admin(context, "ListNodes").nodes
        online = [one for one in nodes if one.state == admin_pb2.NODE_STATE_ONLINE]
        if usable := [mac_of(one) for one in online if one.heartbeat.memory_usable]:
            return "the cluster's nodes", usable
    except (ConfigError, PermissionDenied) as error:
        if error.reason not in ("NO_OPERATOR_BUNDLE", "OTHERS_STATE"):
            raise
    except Unavailable as error:
        say(f"the cluster does not answer ({error.message}); this machine alone:")
    return "no cluster", [host_of(context).reach(own_mac)]


@command(app, "split", example="sealring model split ~/models/Qwen3-8B --split 18,18 --into /Volumes/stick")
def split_model(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="model folder")],
    split: Annotated[str, typer.Option(metavar="A,B,...", help="layers per stage, as the plan has them")],
    into: Annotated[Path, typer.Option(metavar="DIR", help="where the parts go")],
    as_json: AsJson = False,
) -> None:
    """Write each stage's part of a model, for machines that cannot hold the whole.

    Copy a part into a models folder of the machine, with its holes (tar -S, rsync -S); the node takes it for
    these layers. A copy without the holes works, too, and is as long as the whole model.
    """
    from sealring.node.engine.apart import ask_apart
    from sealring.node.models.partial_model import split as write_parts

    _check_folder(path)
    with progress(f"splitting {path}") as shown:
        layers = ",".join(map(str, parse_split(split)))
        found = host_of(context).reach(
            ask_apart, "sealring.node.engine.ranges", [str(path.resolve()), layers]
        )
        made = write_parts(path.resolve(), into.resolve(), found["stages"], shown.update)
    if as_json:
        print_json([{"part": str(folder), "bytes": done} for folder, done in made])
        return
    print_table(["part", "size"], [[str(folder), size(done)] for folder, done in made])


@command(app, example="sealring model check ~/models/Qwen3-8B --stages 3")
def check(
    context: typer.Context,
    path_or_config: Annotated[
        str,
        typer.Argument(metavar="PATH_OR_CONFIG", help="model folder, config.json, or FILE.json#KEY"),
    ],
    stages: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="stages of about the same size [default: a cut of each kind]"),
    ] = None,
    split: Annotated[str, typer.Option(metavar="A,B,...", help="layers per stage, by hand")] = "",
    rows: Annotated[int, typer.Option(min=1, max=64, help="sequences at once")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="of random weights and prompts")] = 0,
    adapter: Adapter = "",
    as_json: AsJson = False,
) -> None:
    """Compare a whole model with its stages, logit by logit.

    With the weights of a folder, or with random ones for a config.json. Exits with 13 when they differ.
    """
    from sealring.node.engine.apart import ask_apart

    sizes = parse_split(split) or None
    asked: dict[str, Any] = {"splits": sizes, "stages": stages, "rows": rows, "seed": seed}
    asked |= {"seconds": _LONG_SECONDS} | ({"adapter": adapter} if adapter else {})
    with progress(f"comparing {path_or_config} with its stages"):
        report = host_of(context).reach(
            ask_apart, "sealring.node.engine.check", [path_or_config, json.dumps(asked)]
        )
    if as_json:
        print_json(report)
    else:
        ranges = " ".join(f"{lo}-{hi - 1}" for lo, hi in report["stages"])
        largest = report["max_abs_diff"]
        difference = "not a number" if largest is None else f"{largest:g}"
        columns = ["model type", "layers", "stages", "weights", "exact", "largest difference", "tokens equal"]
        columns += ["rows as alone"]
        answers = [report[name] for name in ("exact", "tokens_equal", "alone_equal")]
        outcome = [_yes(answers[0]), difference, *map(_yes, answers[1:])]
        print_table(columns, [[report["model_type"], report["layers"], ranges, report["weights"], *outcome]])
        print_table(["what", "value"], _known(report))
        say(_in_a_line(report))
    if report["right"]:
        return
    if report["wrong_cuts"]:
        say(f"a cut is wrong in front of layers {', '.join(map(str, report['wrong_cuts']))}")
    if report["same"] and report["tokens_equal"]:
        say("a row's answer depends on the rows that run with it")
    else:
        say("the stages do not compute what the whole model computes")
    raise typer.Exit(CHECK_FAILED)


def _known(report: dict[str, Any]) -> list[list[str]]:
    """What the table of a check does not hold, a row each."""
    longest, reach, far = report["longest"], report["reach"], "longer than all that it names"
    beyond = far if longest > reach else f"nothing is shown of longer ones, and {reach} are named"
    rows = [
        ["code", f"{report['code']} ({report['package']})"],
        ["longest prompt", f"{longest} tokens, {beyond}"],
        ["crosses a cut", "; ".join(report["crosses"]) or "nothing: one stage holds it"],
        ["rows", "together" if report["rows_together"] else "in turn"],
        ["KV bits", ", ".join(map(str, report["kv_bits"])) or "its own"],
        ["kept prefixes", "cut anywhere" if report["prefixes"] == "any" else "whole, or up to a mark"],
        ["drafts", ", ".join([_yes(report["drafts"]), *["MTP"] * report["mtp"], *report["drafters"]])],
    ]
    if (template := report["template"]) is not None:
        rows += [
            ["calls", report["calls"] or "not read"],
            ["thoughts", _yes(report["thoughts"])],
            ["chat template", ", ".join(template["changes"]) or "takes messages as they are"],
            ["not shown by it", ", ".join(template["lost"]) or "nothing"],
        ]
    return rows


def _in_a_line(report: dict[str, Any]) -> str:
    """The whole of a check, to paste into an issue."""
    from sealring.mesh.rpc.protocol import software_version

    stages = " ".join(f"{lo}-{hi - 1}" for lo, hi in report["stages"])
    told = "; ".join(f"{what} {value}" for what, value in _known(report))
    outcome = "right" if report["right"] else "not right"
    what = f"{report['model_type']}, {report['weights']} weights, {stages} {outcome}"
    return f"sealring {software_version()}: {what}; {told}"


@command(app, example="sealring model profile ~/models/Qwen3-8B")
def profile(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="model folder")],
    adapter: Adapter = "",
    as_json: AsJson = False,
) -> None:
    """Show what a model needs, without loading its weights."""
    found = _measured(context, path, adapter)
    if as_json:
        print_json(found)
        return
    weights = sum(found["layer_bytes"]) + found["embed_bytes"] + (0 if found["tied"] else found["head_bytes"])
    rows = [
        ["model type", found["model_type"]],
        ["layers", found["layers"]],
        ["weights", size(weights)],
        ["KV per token", size(sum(found["kv_bytes_per_token"]))],
        ["context", found["max_context"] or "not said"],
        ["digest", found["digest"]],
    ]
    print_table(["what", "value"], rows)


def _measured(context: typer.Context, path: Path, adapter: str) -> dict[str, Any]:
    from sealring.node.engine.apart import ask_apart

    _check_folder(path)
    tuned = ["--adapter", adapter] if adapter else []
    with progress(f"measuring {path}"):
        found: dict[str, Any] = host_of(context).reach(
            ask_apart, "sealring.node.engine.profile", [str(path), *tuned]
        )
    return found


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"there is no model folder {path}", hint="check the path", reason="MODEL_NOT_FOUND")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
