"""Images: hostile files beside a stream, an agent's session, and a picture's way from file to rows.

* `hostile`: broken and outsized files, one after the other through each API, beside another client's stream:
  its longest pause, and the memory of the head's processes.
* `session`: an agent that shows all its screenshots again with each turn, and one more: CPU time of the
  processes that read images.
* `share`: a picture of 1,024 x 1,024 from file to rows here, over mlx-vlm's own time for it, in turns. Its
  tower has half the width of Qwen2-VL's, and 1 of its 32 layers: with all of it the ratio is nearer to 1.
* `text`: what a head of a model that only reads has of all this: processes and foreign modules.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import importlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.clusters import Deployment, cluster, family
from bench.frame import Result, Table, progress
from bench.hostile import TARGET, longest_pause
from bench.models import SHAPES, random_model
from bench.openai_client import Reply, ask
from bench.verdict import Check
from sealring.cli.local.cluster import LocalCluster
from sealring.node.engine.vision.sizes import DECODER_BYTES, PROCESSOR_BYTES
from sealring.node.models.folders import VISION, bundled_model

QUICK = ("--files", "3", "--turns", "3", "--rounds", "1")
QUICK_SECONDS = 180.0

SHARE = 1.1
_LOOK_SECONDS = 0.1
_SUPPORT = Path(__file__).parents[1] / "tests" / "support"
_SECONDS = 120.0


def _openai(file: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}


def _responses(file: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{file}"}
    return "/v1/responses", {"input": [{"role": "user", "content": [part]}]}


def _anthropic(file: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": file}
    content = [{"type": "image", "source": source}]
    return "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def _ollama(file: str) -> tuple[str, dict[str, Any]]:
    said = {"role": "user", "content": "x", "images": [file]}
    return "/api/chat", {"messages": [said], "stream": False}


APIS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "openai": _openai,
    "responses": _responses,
    "anthropic": _anthropic,
    "ollama": _ollama,
}


class Memory:
    """The largest resident size of each kind of process below a node, while it is looked at."""

    def __init__(self, pid: int) -> None:
        self.most: dict[str, int] = {}
        self._pid = pid

    async def watch(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        for process in family(self._pid):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                name = next((one for one in ("decoding", "processor", "engine.main") if one in command), "")
                self.most[name] = max(self.most.get(name, 0), process.memory_info().rss)


async def run(options: argparse.Namespace) -> Result:
    found: Result = {}
    if options.files or options.turns:
        wanted = [Deployment(VISION, bundled_model(VISION), spec={"max_rows": 8})]
        async with cluster(wanted) as made:
            if options.files:
                found["hostile"] = await _hostile(made, options.files)
            if options.turns:
                found["session"] = await _session(made, options.turns)
    if options.rounds:
        progress("a picture's way to its rows")
        found["share"] = [_share() for _ in range(options.rounds)]
    async with cluster([Deployment("demo", random_model(SHAPES["2x64"]))]) as made:
        (name,) = made.node_names
        commands = [" ".join(one.cmdline()) for one in family(made.processes[name])]
        found["text"] = {"processes": sum("vision" in one for one in commands), "modules": _modules()}
    return found


@contextlib.asynccontextmanager
async def _beside(made: LocalCluster, tasks: list[Any]) -> AsyncIterator[None]:
    running = [asyncio.ensure_future(one) for one in tasks]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _hostile(made: LocalCluster, count: int) -> dict[str, Any]:
    chosen = list(_support("hostileimages").HOSTILE.items())[:count]
    files = {name: base64.b64encode(make()).decode() for name, (_, make) in chosen}
    await _post(made, *_openai(base64.b64encode(_screenshot(0)).decode()))
    replies: list[Reply] = []
    memory = Memory(made.processes[made.node_names[0]])
    pauses, statuses = {}, []
    async with _beside(made, [_watch(made, replies), memory.watch()]):
        await asyncio.sleep(5.0)
        now = time.perf_counter()
        pauses["nothing"] = longest_pause(replies, now - 4.0, now)
        for name, file in files.items():
            progress(f"hostile: {name}")
            begin = time.perf_counter()
            for of_file in APIS.values():
                statuses.append(await _post(made, *of_file(file)))
            pauses[name] = longest_pause(replies, begin, time.perf_counter())
    return {
        "pauses": {name: round(pause, 3) for name, pause in pauses.items()},
        "refused": sum(status in (400, 413) for status in statuses),
        "asked": len(statuses),
        "cut": sum(bool(reply.error) for reply in replies),
        "megabytes": {name: round(size / 1e6) for name, size in memory.most.items() if name},
    }


async def _watch(made: LocalCluster, replies: list[Reply]) -> None:
    """One stream after the other, for ever, of another client: prompts of one are read in turn."""
    body: dict[str, Any] = {"model": VISION, "messages": [{"role": "user", "content": "go on"}]}
    body |= {"max_tokens": 1900, "ignore_eos": True, "user": "another"}
    while True:
        replies.append(Reply(time.perf_counter()))
        await ask(made.http_url, body, into=replies[-1])


async def _session(made: LocalCluster, turns: int) -> list[dict[str, Any]]:
    """CPU seconds of the processes that read images, and milliseconds to the first token, turn by turn."""
    pid = made.processes[made.node_names[0]]
    said: list[dict[str, Any]] = []
    found = []
    for turn in range(turns):
        progress(f"session: turn {turn + 1}")
        part = {"type": "image_url", "image_url": {"url": _url(_screenshot(turn))}}
        said.append({"role": "user", "content": [part]})
        before = _reading(pid)
        body = {"model": VISION, "messages": said, "max_tokens": 4, "temperature": 0}
        reply = await ask(made.http_url, body | {"stream_options": {"include_usage": True}})
        said.append({"role": "assistant", "content": reply.text})
        found.append(
            {
                "images": turn + 1,
                "cpu": round(_reading(pid) - before, 3),
                "ttft_ms": round(1e3 * reply.ttft) if reply.ok else None,
                "new": reply.prompt_tokens - reply.cached_tokens,
            }
        )
    return found


def _reading(pid: int) -> float:
    """CPU seconds of an engine's processes for images, and of those that have ended."""
    spent = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            if "engine.main" in command:
                spent += times.children_user + times.children_system
            elif "engine.vision" in command:
                spent += times.user + times.system
    return spent


async def _post(made: LocalCluster, path: str, body: dict[str, Any]) -> int:
    import httpx

    async with httpx.AsyncClient(base_url=made.http_url, timeout=_SECONDS) as http:
        return (await http.post(path, json={"model": VISION, "max_tokens": 1} | body)).status_code


def _share() -> dict[str, float]:
    """Seconds from the file of a picture to its rows, here and by mlx-vlm, in processes of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.pictures"], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _measure_share() -> dict[str, float]:
    import mlx.core as mx
    from PIL import Image

    from sealring.node.engine.vision import mlx_vlm_import
    from sealring.node.engine.vision.check import random_whole, save
    from sealring.node.engine.vision.tower import load_tower
    from sealring.node.engine.vision.viewing import Viewer
    from sealring.v1 import inference_pb2 as inference

    kit = _support("visionmodels")
    made = kit.FAMILIES["qwen2_vl"]
    tiny = json.loads((_SUPPORT.parent / "data" / "archs-images.json").read_bytes())["qwen2_vl"]["config"]
    names = {"image_token_id", "image_token_index"}
    config = {key: value for key, value in tiny.items() if key not in names} | made.config
    config["vision_config"] = tiny["vision_config"] | {
        **{"depth": 1, "embed_dim": 640, "num_heads": 8, "mlp_ratio": 4},
        **{"patch_size": 14, "spatial_patch_size": 14},
    }
    config[made.row_name] = made.special.index(made.row)
    with tempfile.TemporaryDirectory() as name:
        folder = kit.write_folder(Path(name), "qwen2_vl", config)
        whole = random_whole(config, 0)
        save(whole, config, folder, {})
        files = [_screenshot(0, side, side) for side in (224, 1024)]
        width = config.get("text_config", config)["hidden_size"]
        viewer = Viewer(folder, dict(enumerate(made.special)))
        viewer.placeholder = next(one for one in viewer.placeholders if one in made.image)
        tower = load_tower(folder, width, mx.float32)
        assert tower is not None
        mlx_vlm_import.family("qwen2_vl")
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(str(folder))

        def ours(file: bytes) -> None:
            messages = [inference.ChatMessage(role="user", images=[inference.Image(data=file)])]
            with contextlib.closing(viewer.read(messages)) as reading:
                for _ in (*reading.add_all(), *reading.make_ready(0)):
                    pass
            ids = [viewer.row_tokens[0]] * reading.seen[0].shape.rows
            (picture,) = reading.pictures_in(ids)
            mx.eval(tower.rows(picture).embeddings)

        def theirs(file: bytes) -> None:
            image = Image.open(io.BytesIO(file)).convert("RGB")
            given = dict(processor(images=[image], text=[made.image], add_special_tokens=False))
            arrays = {key: mx.array(given[key]) for key in ("pixel_values", "image_grid_thw")}
            ids = mx.array(given["input_ids"])
            pixels = arrays.pop("pixel_values")
            embedded: Any = whole
            mx.eval(embedded.get_input_embeddings(ids, pixels, mask=None, **arrays).inputs_embeds)

        times: dict[str, float] = {}
        for file in files:  # the first is for what is loaded with the first image
            for key, work in (("ours", ours), ("theirs", theirs)):
                begun = time.perf_counter()
                work(file)
                times[key] = round(time.perf_counter() - begun, 3)
        viewer.close()
    return times


def _modules() -> int:
    """Modules of Pillow, mlx-vlm and transformers that an engine has."""
    code = "import sys, sealring.node.engine.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return sum(one.partition(".")[0] in ("PIL", "mlx_vlm", "transformers") for one in done.stdout.split())


def _support(name: str) -> Any:
    """A module of tests/support, which makes the files and folders of the tests, too."""
    if str(_SUPPORT) not in sys.path:
        sys.path.append(str(_SUPPORT))
    return importlib.import_module(name)


def _screenshot(number: int, width: int = 1280, height: int = 800) -> bytes:
    """A PNG with lines of characters, each another."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for line in range(0, height, 14):
        said = "".join(chr(33 + (line * 7 + at * (number + 3)) % 90) for at in range(width // 7))
        draw.text((4, line), said, fill=(line % 200, number % 200, 90))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def tables(result: Result) -> list[Table]:
    found = []
    if hostile := result.get("hostile"):
        rows = [[name, pause] for name, pause in hostile["pauses"].items()]
        found.append(
            Table("Another client's stream beside hostile files", ["file", "longest pause, s"], rows)
        )
        sizes = [[name, size] for name, size in hostile["megabytes"].items()]
        found.append(Table("Processes of the head", ["process", "most, MB"], sizes))
    if session := result.get("session"):
        turns = [list(one.values()) for one in session]
        columns = ["images", "reading, CPU s", "first token, ms", "new tokens"]
        found.append(Table("An agent's session", columns, turns))
    if share := result.get("share"):
        rounds = [[one["ours"], one["theirs"], round(one["ours"] / one["theirs"], 3)] for one in share]
        found.append(Table("From file to rows", ["here, s", "mlx-vlm, s", "ratio"], rounds))
    text = result["text"]
    found.append(Table("A head that reads text only", [*text], [[*text.values()]]))
    return found


def checks(result: Result) -> list[Check]:
    found = [Check("processes for images at a head of texts", [result["text"]["processes"]], 0)]
    found.append(Check("modules for images at a head of texts", [result["text"]["modules"]], 0))
    if hostile := result.get("hostile"):
        pauses = [pause for name, pause in hostile["pauses"].items() if name != "nothing"]
        most = hostile["megabytes"]
        found += [
            Check("longest pause beside hostile images, s", [max(pauses)], TARGET),
            Check("hostile images that are not refused", [hostile["asked"] - hostile["refused"]], 0),
            Check("memory of the decoder, MB", [most.get("decoding", 0)], DECODER_BYTES / 1e6),
            Check("memory of the processor, MB", [most.get("processor", 0)], PROCESSOR_BYTES / 1e6),
        ]
    if share := result.get("share"):
        ratios = [round(one["ours"] / one["theirs"], 3) for one in share]
        found.append(Check("a picture's time to its rows, over mlx-vlm's", ratios, SHARE))
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=24, help="hostile files; 0: none")
    parser.add_argument("--turns", type=int, default=30, help="turns of the agent's session; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with mlx-vlm; 0: none")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure_share()))
