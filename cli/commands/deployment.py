"""`sealring deployment`, and `sealring deploy`: models and the rings that serve them."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.calls.completion import completes
from sealring.cli.calls.held import lacks_parts, lies_in_parts, pull
from sealring.cli.calls.members import find_node, links_along, print_links
from sealring.cli.calls.operator import Admin, call_admin, run_admin
from sealring.cli.calls.waiting import own_sampling, progressed, wait_until_serving
from sealring.cli.terminal.command import ADMIN, command
from sealring.cli.terminal.options import AsJson, Seconds
from sealring.cli.terminal.output import (
    moment,
    plain,
    print_data,
    print_json,
    print_table,
    progress,
    say,
)
from sealring.mesh.errors import InvalidInput, NotFound, ResourceExhausted
from sealring.mesh.ring.limits import (
    MAX_CONTEXT,
    MAX_KEEP_ALIVE,
    MAX_PREFILL_CHUNK,
    MAX_REPLICAS,
    MAX_ROWS,
    MAX_STAGES,
)
from sealring.mesh.system.files import read_bounded
from sealring.mesh.trust.levels import NAMED, SCORES, TrustLevel, described
from sealring.mesh.units import size

app = typer.Typer(
    name="deployment", help="Deployments: models, and the rings that serve them.", no_args_is_help=True
)
short = typer.Typer()

PLAN_SECONDS = 180.0
"""A node that sees a large model for the first time reads the headers of all its weights."""

FETCH_SECONDS = 86400.0

_SIMULATED = {"context", "max_rows", "stages", "split", "strategy", "clear_links", "backend", "replicas"}
"""Fields of a specification that --simulate takes."""

_SHAPE = "What a ring holds"
_NODES = "Which nodes"
_LOADING = "When it is loaded, and by which names"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="name in the nodes' model folders, path, or hub id",
        autocompletion=completes("model"),
    ),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="what clients call it [default: the model's last part]")
]
Context = Annotated[
    int,
    typer.Option(
        "--context",
        min=0,
        max=MAX_CONTEXT,
        metavar="TOKENS",
        help="longest prompt and answer together [default: the model's own, as far as it fits]",
        rich_help_panel=_SHAPE,
    ),
]
TrustFloor = Annotated[
    TrustLevel,
    typer.Option(
        metavar="LEVEL",
        show_default=False,
        help=f"use nodes of this level or above: {NAMED} [default: any]",
        rich_help_panel=_NODES,
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, max=MAX_REPLICAS, help="rings that serve it", rich_help_panel=_NODES)
]
MaxRows = Annotated[
    int,
    typer.Option(
        min=0, max=MAX_ROWS, help="sequences at once [default: what memory holds]", rich_help_panel=_SHAPE
    ),
]
Stages = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_STAGES,
        help="nodes per ring, while there are as many [default: as few as hold it]",
        rich_help_panel=_NODES,
    ),
]
Split = Annotated[
    str, typer.Option(metavar="A,B,...", help="layers of each node, by hand", rich_help_panel=_NODES)
]
PromptSplit = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help="layers with which each node computes prompts, with --split; a node may hold more for them. "
        "0: the same layers, even where others would be faster",
        rich_help_panel=_NODES,
    ),
]
Members = Annotated[
    list[str] | None,
    typer.Option(
        "--member",
        metavar="NODE",
        help="use only this node; may be repeated",
        rich_help_panel=_NODES,
        autocompletion=completes("node"),
    ),
]
KvBits = Annotated[
    int,
    typer.Option(
        "--kv-bits",
        min=0,
        max=8,
        metavar="8|4",
        help="keep the KV cache in 8 or 4 bits [default: the model's own precision]",
        rich_help_panel=_SHAPE,
    ),
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes",
        help="share the prefix cache across API keys; clients can then guess how other prompts begin",
        rich_help_panel=_SHAPE,
    ),
]
Speculate = Annotated[
    bool,
    typer.Option(
        "--speculate",
        help="give a request that is alone on its ring several tokens a step where they can be guessed",
        rich_help_panel=_SHAPE,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="guess tokens also by this small model of the same tokenizer, at each ring's first node, or by "
        "this drafter that reads hidden states (DFlash, DFlash2, DSpark, EAGLE-3), at its last",
        rich_help_panel=_SHAPE,
    ),
]
Adapter = Annotated[
    str,
    typer.Option(
        metavar="FOLDER",
        help="tune the model by this adapter: LoRA or DoRA as mlx_lm.lora writes it, or LoRA as PEFT does",
        rich_help_panel=_SHAPE,
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        metavar="pipeline|tensor",
        help="nodes hold some of the layers, or a part of every layer (--stages 2, 4 or 8)",
        rich_help_panel=_NODES,
    ),
]
ClearLinks = Annotated[
    bool,
    typer.Option(
        "--clear-links",
        help="with tensor: let the network read what nodes add up; sealed prompts are refused then",
        rich_help_panel=_NODES,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="ring|jaccl|nccl", help="with tensor: MLX's backend [default: ring]", rich_help_panel=_NODES
    ),
]
OrPipeline = Annotated[
    bool,
    typer.Option(
        "--or-pipeline",
        help="with tensor: serve as a pipeline where the backend does not come up",
        rich_help_panel=_NODES,
    ),
]
OnDemand = Annotated[
    bool,
    typer.Option(
        "--on-demand",
        help="load it when a client asks for it, and unload it when nobody does",
        rich_help_panel=_LOADING,
    ),
]
KeepAlive = Annotated[
    Seconds | None,
    Seconds.option(
        "with --on-demand: unload it after this time without a request; 0: never [default: 15m]",
        least=0,
        most=MAX_KEEP_ALIVE,
        panel=_LOADING,
    ),
]
Pin = Annotated[
    bool,
    typer.Option("--pin", help="with --on-demand: never unload it to make room", rich_help_panel=_LOADING),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        metavar="NAME",
        help="a further name for clients, or the beginning of names (gpt-5*); may be repeated",
        rich_help_panel=_LOADING,
    ),
]
Simulate = Annotated[
    Path | None,
    typer.Option(
        "--simulate",
        metavar="FILE",
        help="plan over the machines, links and model of a JSON file instead; no cluster is asked",
    ),
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_PREFILL_CHUNK,
        metavar="TOKENS",
        help="tokens of a prompt that are computed at once [default: as many as the nodes gain by]",
        rich_help_panel=_SHAPE,
    ),
]


def make_spec(
    model: ModelName,
    name: Name = None,
    tokens: Context = 0,
    trust_floor: TrustFloor = TrustLevel.NONE,
    replicas: Replicas = 1,
    max_rows: MaxRows = 0,
    stages: Stages = 0,
    split: Split = "",
    prompt_split: PromptSplit = "",
    member: Members = None,
    prefill_chunk: PrefillChunk = 0,
    kv_bits: KvBits = 0,
    share_prefixes: SharePrefixes = False,
    speculate: Speculate = False,
    draft: Draft = "",
    adapter: Adapter = "",
    strategy: Strategy = "pipeline",
    clear_links: ClearLinks = False,
    backend: Backend = "",
    or_pipeline: OrPipeline = False,
    on_demand: OnDemand = False,
    keep_alive: KeepAlive = None,
    pin: Pin = False,
    alias: Alias = None,
) -> Any:
    """The deployment that the options describe. Raises InvalidInput (BAD_SPLIT)."""
    from sealring.v1 import admin_pb2

    model = _named(model)
    return admin_pb2.DeploymentSpec(
        name=name if name is not None else default_name(model),
        model=model,
        strategy=strategy,
        clear_links=clear_links,
        backend=backend,
        or_pipeline=or_pipeline,
        context=tokens,
        trust_floor=SCORES[trust_floor],
        replicas=replicas,
        max_rows=max_rows,
        stages=stages,
        split=parse_split(split),
        prompt_split=[0] if prompt_split == "0" else parse_split(prompt_split),
        members=member or [],
        prefill_chunk=prefill_chunk,
        kv_bits=kv_bits,
        share_prefixes=share_prefixes,
        speculate=speculate or bool(draft),
        draft=_named(draft),
        adapter=_named(adapter),
        on_demand=on_demand,
        keep_alive=None if keep_alive is None else round(keep_alive),
        pinned=pin,
        aliases=alias or [],
    )


def _named(model: str) -> str:
    """A model as nodes know it: the whole path of a folder here, else as it is."""
    path = Path(os.path.expanduser(model))  # leaves the home folder of an unknown user as it is
    if os.path.isdir(path) and (model.startswith((".", "~")) or "/" in model):
        return str(path.resolve())
    return model


def describes_deployment(command: Callable[..., None], *, model_needed: bool = True) -> Callable[..., None]:
    """Gives a command the options of `make_spec` in the place of `spec`: Typer reads its `__signature__`."""
    options = dict(inspect.signature(make_spec, eval_str=True).parameters)
    if not model_needed:
        options["model"] = options["model"].replace(default="")
    own = inspect.signature(command, eval_str=True)
    context, _, *others = own.parameters.values()

    @functools.wraps(command)
    def described(context: typer.Context, **given: Any) -> None:
        command(context, make_spec(**{name: given.pop(name) for name in options}), **given)

    described.__signature__ = own.replace(parameters=[context, *options.values(), *others])  # type: ignore[attr-defined]
    return described


@command(app, example="sealring deployment create Qwen/Qwen3-8B --stages 2", section="cli", fields=ADMIN)
@describes_deployment
def create(
    context: typer.Context,
    spec: Any,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it serves")] = True,
    wait_timeout: Annotated[
        Seconds,
        Seconds.option("how long to wait at most, but for models that nodes fetch", least=1, most=86400),
    ] = Seconds(600),
    as_json: AsJson = False,
) -> None:
    """Serve a model with rings of nodes.

    Plans it over the nodes, forms its rings and waits until they serve.
    """
    asked = False

    async def work(admin: Admin) -> tuple[Any, int]:
        nonlocal asked
        await name_members(admin, spec)
        with progress(f"planning {spec.name}") as shown:
            asked = True
            try:
                answer, fetches = await create_deployment(admin, spec, shown.update)
            except ResourceExhausted as error:
                raise await _with_suggestion(admin, spec, error) from None
            if wait and not spec.on_demand:
                most = FETCH_SECONDS if fetches else wait_timeout
                await wait_until_serving(admin, spec.name, seconds=most, say=shown.update)
        return answer.plan, await count_idle(admin, answer.plan)

    try:
        plan, idle = run_admin(context, work)
    except KeyboardInterrupt:
        if asked:
            say(
                f"the deployment goes on without this command (hint: sealring deployment list shows it, "
                f"sealring deployment delete {spec.name} ends it)"
            )
        raise
    if as_json:
        print_json(plain(plan))
        return
    print_plan(plan)
    if spec.on_demand:
        say(f"{spec.name} is loaded when a client asks for it; the plan above is made anew then")
        return
    say(f"{spec.name} is {'serving' if wait else 'on its way'}")
    if told := own_sampling(plan.profile.card):
        say(told)
    if idle and not (spec.stages or spec.split or spec.members):
        others = "one more node is" if idle == 1 else f"{idle} more nodes are"
        say(f"it is on as few nodes as it needs; {others} online (--stages N or --replicas N use more)")


async def _with_suggestion(admin: Admin, spec: Any, error: ResourceExhausted) -> ResourceExhausted:
    """The refusal of a model that does not fit, with what would in its hint."""
    from sealring.cli.fitting.machines import mac_of
    from sealring.cli.fitting.showing import suggestion

    if error.reason != "DOES_NOT_FIT":
        return error
    nodes = (await admin.call("ListNodes")).nodes
    macs = [mac_of(node) for node in nodes if node.heartbeat.memory_usable]
    error.hint = "; ".join(filter(None, (error.hint, suggestion(spec.model, macs) if macs else "")))
    return error


async def create_deployment(admin: Admin, spec: Any, shown: Callable[[str], None]) -> tuple[Any, bool]:
    """Creates the deployment; of a model that no node has one of them fetches first what planning needs, and
    likewise of its draft model. The answer, and whether its nodes fetch what they lack of these models now,
    which takes as long as it does."""
    from sealring.cli.fitting.known import hub_id

    # Each node of the one ring fetches its own part; where several need the same, one fetches it for all.
    apart = spec.strategy == "pipeline" and spec.replicas <= 1
    if not apart and await lies_in_parts(admin, spec.model):
        await pull(admin, spec.model, spec.members[:1], shown, alone=False)
        shown(f"planning {spec.name}")
    left = {"model", "draft"}
    while True:
        try:
            answer = await admin.call("CreateDeployment", spec=spec, seconds=PLAN_SECONDS)
            return answer, await lacks_parts(admin, answer.plan)
        except NotFound as error:
            param = error.metadata.get("param", "model")
            if error.metadata.get("fetchable") != "yes" or param not in left:
                if listed := hub_id(spec.model):  # a name as `model fits` shows it
                    error.hint = f"by its id on the hub it is fetched: sealring deploy {listed}"
                raise
            left.remove(param)
            lacking = error
        if lacking.metadata.get("param") == "draft":
            await pull(admin, spec.draft, [lacking.metadata["node"]], shown, to_plan=True)
        else:
            await pull(admin, spec.model, spec.members[:1], shown, to_plan=apart, alone=False)
        shown(f"planning {spec.name}")


command(
    short,
    "deploy",
    example="sealring deploy Qwen/Qwen3-8B",
    section="cli",
    fields=ADMIN,
    rich_help_panel="Start",
)(create)


@command(app, example="sealring deployment plan Qwen3-8B --replicas 2", section="cli", fields=ADMIN)
@functools.partial(describes_deployment, model_needed=False)
def plan(context: typer.Context, spec: Any, simulate: Simulate = None, as_json: AsJson = False) -> None:
    """Show what `deploy` would do and what other shapes would bring, and do nothing.

    With --simulate no cluster is asked, and the file names the model.
    """
    if simulate is not None:
        _show_simulated(simulate, spec, as_json)
        return
    if not spec.model:
        raise InvalidInput(
            "no model is named", hint="give MODEL, or --simulate FILE", reason="MODEL_MISSING", param="model"
        )

    async def work(admin: Admin) -> Any:
        await name_members(admin, spec)
        with progress(f"planning {spec.name}"):
            try:
                planned = await admin.call("PlanDeployment", spec=spec, seconds=PLAN_SECONDS)
            except ResourceExhausted as error:
                raise await _with_suggestion(admin, spec, error) from None
        return planned, await admin.call("ListNodes")

    answer, nodes = run_admin(context, work)
    if as_json:
        print_json(plain(answer.plan) | {"shapes": plain(answer.shapes)})
        return
    print_plan(answer.plan)
    print_data("")
    known = plain(nodes)
    print_change(answer.plan, known["nodes"])
    print_links(links_along(known["links"], answer.plan.rings), known["nodes"])
    if answer.shapes.shapes:
        print_data("")
        print_shapes(answer.shapes)


def _show_simulated(file: Path, spec: Any, as_json: bool) -> None:
    from sealring.coordinator.planning.simulation import MAX_BYTES, simulate
    from sealring.v1 import admin_pb2

    given = {each.name for each, _ in spec.ListFields()} - {"name", "model"} - _SIMULATED
    if spec.model or given or spec.replicas > 1:
        what = ", ".join(sorted(given)) or ("replicas" if spec.replicas > 1 else "a model")
        raise InvalidInput(
            f"--simulate goes without {what}",
            hint="the file names the model; --context, --max-rows, --stages, --split, --strategy go with it",
            reason="BAD_SIMULATION",
            param="simulate",
        )
    try:
        content = read_bounded(file, max_bytes=MAX_BYTES)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {file}: {error.strerror}", reason="BAD_SIMULATION", param="simulate"
        ) from None
    named = admin_pb2.DeploymentSpec(model="simulated")
    named.MergeFrom(spec)
    with progress("simulating each shape"):
        made = simulate(content, named)
    if as_json:
        print_json(plain(made.plan) | {"shapes": plain(made.shapes)})
        return
    print_shapes(made.shapes)
    for reason in made.plan.reasons:
        print_data(reason)


@command(app, "list", example="sealring deployment list", section="cli", fields=ADMIN)
def list_deployments(context: typer.Context, as_json: AsJson = False) -> None:
    """List deployments and the state of their rings."""
    found = plain(call_admin(context, "ListDeployments"))["deployments"]
    if as_json:
        print_json(found)
        return
    print_deployments(found)


@command(app, example="sealring deployment delete qwen3-8b", section="cli", fields=ADMIN)
def delete(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="what clients call it", autocompletion=completes("deployment")),
    ],
) -> None:
    """End a deployment's rings and forget it."""
    call_admin(context, "DeleteDeployment", name=name)
    say(f"deleted {name}")


async def count_idle(admin: Admin, plan: Any) -> int:
    """How many nodes are online and hold nothing, of this plan or another ring."""
    from sealring.v1 import admin_pb2

    answer = await admin.call("ListNodes")
    used = {stage.member for ring in plan.rings for stage in ring.stages}
    free = [node for node in answer.nodes if node.id not in used and not node.rings]
    return sum(node.state == admin_pb2.NODE_STATE_ONLINE for node in free)


async def name_members(admin: Admin, spec: Any) -> None:
    """Puts ids where the spec has names of nodes. Raises NotFound, InvalidInput (AMBIGUOUS_NODE)."""
    spec.members[:] = [await find_node(admin, node) for node in spec.members]


def default_name(model: str) -> str:
    """The deployment's default name: the last part of the model's, in the letters that names may have."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:56].strip("-") or "model"


def parse_split(text: str) -> list[int]:
    """ "4,4,2" as layers per rank; nothing for "". Raises InvalidInput (BAD_SPLIT)."""
    if not text:
        return []
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 256 or not all(re.fullmatch(r"[1-9][0-9]{0,4}", part) for part in parts):
        raise InvalidInput(
            "the split is not layers per rank with commas between",
            hint="for example --split 4,4,2",
            reason="BAD_SPLIT",
            param="split",
        )
    return [int(part) for part in parts]


def print_plan(plan: Any) -> None:
    """A plan as a table per ring."""
    for ring in plan.rings:
        rows = [
            [
                stage.rank,
                stage.member_name or stage.member[:16],
                layers_of(ring, stage),
                " + ".join(
                    [size(stage.weight_bytes)]
                    + [f"{size(one.bytes)} {one.name}" for one in stage.residents if one.bytes]
                ),
                size(stage.kv_bytes),
                size(stage.memory_usable),
                described(stage.trust),
            ]
            for stage in ring.stages
        ]
        title = f"{plan.spec.name}: ring {ring.ring}, minimum trust {described(ring.min_trust)}"
        title += f", KV in {plan.spec.kv_bits} bits" if plan.spec.kv_bits else ""
        clear = plan.spec.clear_links and not ring.pipeline
        title += f", links in clear ({plan.spec.backend})" if clear else ""
        columns = ["rank", "node", "layers", "weights", "KV per row", "usable", "trust"]
        print_table(columns, rows, title=title)
    for reason in plan.reasons:
        print_data(reason)


def print_shapes(table: Any) -> None:
    """Shapes that a ring could have, the planned one marked, and the reasons below."""
    rows = []
    for one in table.shapes:
        machines = [machine for group in one.groups for machine in group.machines]
        largest = max(machine.memory for machine in machines)
        rows.append(
            [
                one.strategy + (" *" if one.planned else ""),
                " > ".join("+".join(each.name for each in group.machines) for group in one.groups),
                ",".join(str(group.layers) for group in one.groups),
                size(largest),
                one.rows,
                _rate(one.one_request),
                _rate(one.eight_requests),
                _rate(one.full_batch),
                f"{one.compute_ms:.1f} + {one.sums_ms:.1f} + {one.hops_ms:.1f}" if one.one_request else "",
            ]
        )
    columns = ["shape", "machines", "layers", "memory at most", "rows", "one request", "eight", "full batch"]
    title = "shapes, * as planned: estimated tokens/s, and ms of one row's step: compute + sums + hops"
    print_table([*columns, "step"], rows, title=title)
    for reason in table.reasons:
        print_data(reason)


def _rate(rate: float) -> str:
    return "" if not rate else f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def layers_of(ring: Any, stage: Any) -> str:
    """The layers that a planned stage holds, and its share of each in a tensor ring."""
    whole = len(ring.stages) > 1 and all(one.first_layer == 0 for one in ring.stages)
    prompts = f", prompts {stage.prompt_first_layer}-{stage.prompt_end_layer - 1}" * bool(
        stage.prompt_end_layer
    )
    shares = f", 1/{len(ring.stages)} of each" if whole else prompts
    return f"{stage.first_layer}-{stage.end_layer - 1}{shares}"


def print_change(plan: Any, nodes: list[dict[str, Any]]) -> None:
    """What every online node may hold before and after, with KV caches and logits of all rows, and what each
    engine but its first takes besides. What is left to other deployments is as the plan's reasons say."""
    from sealring.coordinator.planning.demand import capacity

    stages = {stage.member: (ring, stage) for ring in plan.rings for stage in ring.stages}
    planned = {ring.ring for ring in plan.rings}
    rows = []
    for node in nodes:
        if node["state"] == "offline":
            continue
        beat, places = node["heartbeat"], node["rings"]
        usable, overhead = beat["memory_usable"], beat["memory_overhead"]
        before = after = max(beat["memory_used"], _granted(places, overhead))
        where = [place["ring"] for place in places]
        if node["id"] in stages:
            ring, stage = stages[node["id"]]
            new = stage.weight_bytes + stage.kv_budget + stage.logits_bytes
            new += sum(one.bytes for one in stage.residents)
            others = [place for place in places if place["ring"] not in planned]
            after = _granted(others, overhead) + overhead * bool(others) + new
            where = [place["ring"] for place in others]
            where.append(f"{ring.ring} {layers_of(ring, stage)}")
        left = size(max(0, capacity(usable) - after))
        rows.append([node["name"], size(usable), size(before), size(after), left, ", ".join(where)])
    columns = ["node", "usable", "before", "after", "left to others", "ring"]
    print_table(columns, rows, title="memory of nodes")


def _granted(places: Sequence[Mapping[str, Any]], overhead: int) -> int:
    """Bytes that the rings of a node may take, and each of its engines but the first."""
    return sum(int(place["memory"]) for place in places) + overhead * max(0, len(places) - 1)


def print_deployments(found: list[dict[str, Any]]) -> None:
    """Deployments and their rings as a table."""
    if not found:
        say("no model is served: sealring deploy MODEL")
        return
    rows = []
    for one in found:
        spec = one["plan"]["spec"]
        for ring in one["rings"] or [{}]:
            suites = sorted({link["suite"] for link in ring.get("links", [])})
            sealed = {planned["ring"] for planned in one["plan"]["rings"] if planned["pipeline"]}
            suites += ["layers' sums in clear"] * (spec["clear_links"] and ring.get("ring") not in sealed)
            rows.append(
                [
                    spec["name"],
                    spec["model"],
                    ring.get("ring", ""),
                    _phase(ring) or one.get("load", {}).get("phase", "").replace("_", " "),
                    ring.get("epoch", ""),
                    ", ".join(suites),
                    moment(one["created"]),
                    ring.get("reason", "") or _load(one) or _guessing(one["plan"], ring),
                ]
            )
    print_table(["name", "model", "ring", "phase", "epoch", "suite", "created", "reason"], rows)
    measured = [line for one in found for line in _links(one)]
    if measured:
        print_data("")
        print_table(["ring", "from", "to", "over", "rate", "round trip"], measured)


def _links(deployment: dict[str, Any]) -> Iterator[list[object]]:
    """The links of a deployment's rings that were measured when their epochs formed."""
    planned = {ring["ring"]: ring["stages"] for ring in deployment["plan"]["rings"]}
    for ring in deployment["rings"]:
        names = {stage["rank"]: stage["member_name"] for stage in planned.get(ring.get("ring", ""), [])}
        for link in ring.get("links", []):
            if link["bytes_per_second"]:
                ends = [names.get(link[end], "") for end in ("from_rank", "to_rank")]
                host = link["address"].rpartition(":")[0]
                took = f"{link['round_trip_us'] / 1000:.2f} ms"
                yield [ring["ring"], *ends, host, f"{size(link['bytes_per_second'])}/s", took]


def _load(deployment: dict[str, Any]) -> str:
    """The reason why a model on demand is not loaded or makes room, or the time at which it is unloaded."""
    load = deployment.get("load")
    if load is None:
        return ""
    waiting = f"{load['waiting']} waiting" if load["waiting"] and load["phase"] != "loaded" else ""
    if load["phase"] == "yielding":
        return "; ".join(filter(None, (load["reason"], "it is unloaded once its requests are answered")))
    expires = f"unloaded at {moment(load['expires'])} if nobody asks" if load["expires"] else ""
    return ": ".join(part for part in (waiting, load["reason"]) if part) or expires


def _guessing(plan: dict[str, Any], ring: dict[str, Any]) -> str:
    """The draft model, or mtp for the model's MTP head, and how many of the tokens that were guessed in this
    epoch were right; or a warning."""
    if warning := _no_drafts(plan):
        return warning
    drafted, accepted = (int(ring.get(part, 0)) for part in ("drafted", "accepted"))
    stages = [stage for one in plan["rings"] if one["ring"] == ring.get("ring") for stage in one["stages"]]
    held = [each for stage in stages for each in stage["residents"]]
    draft = next((each["model"] or each["name"] for each in held if each["guesses"]), "")
    right = f"{accepted} of {drafted} guessed tokens right" if drafted else ""
    return ", ".join(part for part in (draft and f"{draft} guesses", right) if part)


def _no_drafts(plan: dict[str, Any]) -> str:
    """A warning if --speculate has no effect on this plan, whose reasons say why; else nothing."""
    if not plan["spec"]["speculate"]:
        return ""
    able = plan["profile"]["trimmable"] and plan["spec"]["stages"] > 1
    return "" if able else "cannot guess tokens"


def _phase(ring: dict[str, Any]) -> str:
    """The phase, and how far the slowest member is with what it does meanwhile."""
    phase = str(ring.get("phase", ""))
    last = ring.get("slowest")
    return f"{phase}, {progressed(last)}" if last else phase
