"""A whole cluster of real processes on loopback, and the whole model in plain mlx_lm to compare with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import hasty
import httpx
import openai
import psutil
import pytest
from kernels import share_kernels

from sealring.cli.calls.operator import read_bundle
from sealring.cli.calls.waiting import wait_until_serving
from sealring.cli.local.cluster import LocalCluster
from sealring.client import AsyncClient
from sealring.mesh.system.addresses import free_port
from sealring.mesh.system.paths import state_root_of
from sealring.v1 import admin_pb2, inference_pb2, inference_pb2_grpc, membership_pb2

MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "model"
LIMIT_SECONDS = 120.0
"""Within which everything that is waited for has come, however busy the machine is."""

_FORMING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)


CLUSTER = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="session")]
"""Marks of tests with real processes, which live longer than a test."""

HANG_SECONDS = 3600.0
"""For programs that others wrote, which take minutes on a busy machine: only what hangs takes as long."""

AGENTS = [*CLUSTER, pytest.mark.agents, pytest.mark.timeout(2 * HANG_SECONDS)]
"""Marks of tests with programs that `make clients` installs."""


@dataclasses.dataclass(frozen=True)
class Reply:
    text: str
    prompt_tokens: int
    completion_tokens: int
    reason: str


@dataclasses.dataclass
class Ring:
    """A serving cluster and a client of its gRPC edge, with the API key that it has, if any."""

    cluster: LocalCluster
    deployment: Any
    stub: inference_pb2_grpc.InferenceStub
    key: str = ""

    @property
    def model(self) -> str:
        return str(self.deployment.plan.spec.name)

    @property
    def pin(self) -> str:
        """The hash of the cluster's root key, in hex."""
        return read_bundle(self.cluster.operator_bundle).root_sha256.hex()

    def metadata(self) -> Any:
        return (("authorization", f"Bearer {self.key}"),) if self.key else None

    def sealing(self, **settings: Any) -> AsyncClient:
        """A client that seals its prompts."""
        given = {"root_sha256": self.pin, "timeout": LIMIT_SECONDS, "api_key": self.key or None} | settings
        return AsyncClient(given.pop("gateway", self.cluster.grpc_address), **given)

    def openai(self) -> openai.AsyncOpenAI:
        url = f"{self.cluster.http_url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=self.key or "unused", max_retries=0)

    async def ask(self, prompt: inference_pb2.Prompt, max_tokens: int = 0, **fields: Any) -> Reply:
        """The whole reply, from one streamed call."""
        request = inference_pb2.GenerateRequest(
            model=self.model,
            envelope=inference_pb2.Envelope(clear=prompt),
            max_tokens=max_tokens,
            **fields,
        )
        text, finished = [], None
        async for response in self.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=self.metadata()):
            if response.HasField("delta"):
                text.append(response.delta.text)
            elif response.HasField("finished"):
                finished = response.finished
        assert finished is not None
        reason = inference_pb2.FinishReason.Name(finished.reason)
        return Reply("".join(text), finished.prompt_tokens, finished.completion_tokens, reason)

    async def reply(self, prompt: inference_pb2.Prompt, max_tokens: int = 0) -> Reply:
        """As `ask`, if need be from the ring that is formed anew."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                try:
                    return await self.ask(prompt, max_tokens)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _FORMING:
                        raise
                    await asyncio.sleep(0.2)

    async def status(self) -> Any:
        """The first ring, as the coordinator sees it; an empty status while the model is not loaded."""
        answer = await self.cluster.admin.call("ListDeployments")
        (found,) = (one for one in answer.deployments if one.plan.spec.name == self.model)
        return next(iter(found.rings), admin_pb2.RingStatus())

    async def serving(self) -> Any:
        """The status of the ring once it serves, its epoch told by every member and answering."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                before = await self.status()
                if before.phase == membership_pb2.RING_PHASE_SERVING and not before.reason:
                    await self.reply(chat("Hello!"), 1)
                    if (now := await self.status()) == before:
                        return now
                await asyncio.sleep(0.2)

    async def offered(self, rings: int) -> None:
        """Returns when the gateway offers the model over this number of rings."""
        request = inference_pb2.ListModelsRequest()
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                answer = await self.stub.ListModels(request, timeout=30, metadata=self.metadata())
                if [one.rings for one in answer.models if one.name == self.model] == [rings]:
                    return
                await asyncio.sleep(0.1)

    async def counted(self, name: str) -> float:
        """The sum of one of the gateway's metrics, over its labels."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        async with httpx.AsyncClient(base_url=self.cluster.http_url, headers=headers, timeout=200) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        assert any(line.startswith(f"# TYPE sealring_{name} ") for line in lines), name
        samples = (line for line in lines if line.startswith(f"sealring_{name}{{"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    async def idle(self) -> None:
        """Returns when no request has a row any more."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while await self.counted("num_requests_running"):
                await asyncio.sleep(0.05)

    def part(self, node: str, word: str = "") -> psutil.Process:
        """The daemon of a node, or the child of it whose command has the word."""
        return self.parts(node, word)[0] if word else psutil.Process(self.cluster.processes[node])

    def parts(self, node: str, word: str) -> list[psutil.Process]:
        """The children of a node's daemon whose command has the word and that have not ended meanwhile."""
        found = []
        for child in psutil.Process(self.cluster.processes[node]).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if word in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def node_of(self, member: str) -> str:
        """The name of the node with this id."""
        folders = (self.cluster.state_dir / name for name in self.cluster.node_names)
        return next(folder.name for folder in folders if member in (folder / "member.json").read_text())


def chat(*contents: str, **sampling: Any) -> inference_pb2.Prompt:
    roles = ("user", "assistant")
    messages = [
        inference_pb2.ChatMessage(role=roles[number % 2], content=content)
        for number, content in enumerate(contents)
    ]
    return inference_pb2.Prompt(
        chat=inference_pb2.Chat(messages=messages), sampling=inference_pb2.Sampling(**sampling)
    )


HASTY = {"coordinator": {"replace_after": "24h", "drain_timeout": "3s"}}
"""A slow machine is long in starting a node again; who drains one keeps it busy on purpose."""


@asynccontextmanager
async def serving(folder: Path, size: int, memory: str = "", **spec: Any) -> AsyncIterator[Ring]:
    """A cluster of `size` nodes that serves the demo model over all of them, or as `spec` has it. `memory` is
    what each node may use."""
    settings = HASTY | ({"node": {"memory_limit": memory}} if memory else {})
    async with LocalCluster(folder, MODEL, nodes=size, name="demo", settings=settings) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        async with started(cluster, **({"stages": size} | spec)) as ring:
            yield ring


@contextmanager
def built(ring: Ring, module: ModuleType) -> Iterator[None]:
    """What is started meanwhile runs this module."""
    children = ring.cluster.children
    own, children.command = children.command, (sys.executable, str(module.__file__))
    try:
        yield
    finally:
        children.command = own


@asynccontextmanager
async def started(cluster: LocalCluster, **spec: Any) -> AsyncIterator[Ring]:
    """Starts the cluster and deploys its model."""
    share_kernels(cluster.state_dir)
    await cluster.start()
    if spec.get("on_demand"):
        deployment = await on_demand(cluster, cluster.name, **spec)
    else:
        deployment = await cluster.deploy(**spec)
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield Ring(cluster, deployment, inference_pb2_grpc.InferenceStub(channel))


async def on_demand(cluster: LocalCluster, name: str, **spec: Any) -> Any:
    """The deployment of the cluster's model under this name, on demand; it is loaded by the first request."""
    wanted = {"name": name, "model": cluster.model, "on_demand": True} | spec
    await cluster.admin.call("CreateDeployment", spec=wanted, seconds=LIMIT_SECONDS)
    answer = await cluster.admin.call("ListDeployments")
    return next(one for one in answer.deployments if one.plan.spec.name == name)


PROXY_KEY = f"srk_{'a' * 16}_{'b' * 52}"
"""What programs send to proxies of tests, and to gateways, which ask for nothing."""


def give_proxy_key(home: Path) -> None:
    """Puts it where the proxy of the user with this home folder, and `sealring connect`, take it from."""
    file = state_root_of(home) / "proxy.key"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PROXY_KEY)
    file.chmod(0o600)


async def operate(cluster: LocalCluster, *words: str) -> str:
    """What a command prints as the cluster's operator."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealring.cli", *words),
        env=os.environ | {"SEALRING_CLI_OPERATOR": str(cluster.operator_bundle)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    return printed.decode()


@asynccontextmanager
async def proxy(ring: Ring, folder: Path, *options: str) -> AsyncIterator[tuple[str, Any]]:
    """A running proxy, whose programs have PROXY_KEY: its URL and its process."""
    port = free_port()
    give_proxy_key(folder)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "sealring.cli",
            "proxy",
            "--gateway",
            ring.cluster.grpc_address,
            "--root-sha256",
            ring.pin,
        ),
        *("--listen", f"127.0.0.1:{port}", "--state-file", str(folder / "roster-state"), *options),
        env=os.environ | {"HOME": str(folder), "XDG_STATE_HOME": ""},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            while b"proxy_started" not in (line := await process.stderr.readline()):
                assert line, f"the proxy has ended: {await process.wait()}"
        drain = asyncio.create_task(process.stderr.read())
        yield f"http://127.0.0.1:{port}", process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await process.wait() == 0
        await drain


class Arrangements:
    """A cluster of which a test asks for the deployment that it needs; the one before makes room for it."""

    def __init__(self, cluster: LocalCluster, key: str = "") -> None:
        self.cluster = cluster
        self._key = key
        self._made = 0
        self._spec: dict[str, Any] = {}
        self._ring: Ring | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Arrangements:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def have(self, **spec: Any) -> Ring:
        """A ring of a deployment with these fields."""
        if self._ring is None or spec != self._spec:
            await self.clear()
            self._made += 1
            # A name of its own: the gateway must not be taken to offer this one while it offers the last
            self.cluster.name = f"arrangement-{self._made}"
            deployment = await self.cluster.deploy(**spec)
            channel = await self._stack.enter_async_context(
                grpc.aio.insecure_channel(self.cluster.grpc_address)
            )
            stub = inference_pb2_grpc.InferenceStub(channel)
            self._spec, self._ring = spec, Ring(self.cluster, deployment, stub, self._key)
            await self._ring.offered(spec.get("replicas", 1))
        return self._ring

    async def some(self, **spec: Any) -> Ring:
        """The ring that there is, whatever its deployment; otherwise one with these fields."""
        return self._ring or await self.have(**spec)

    @asynccontextmanager
    async def beside(self, **spec: Any) -> AsyncIterator[Ring]:
        """A ring of another deployment, over nodes that serve the last one; deleted at the end."""
        assert self._ring is not None
        admin, name = self.cluster.admin, f"beside-{self._made}"
        wanted = {"name": name, "model": str(MODEL)} | spec
        await admin.call("CreateDeployment", spec=wanted, seconds=LIMIT_SECONDS)
        try:
            deployment = await wait_until_serving(admin, name, seconds=LIMIT_SECONDS)
            ring = dataclasses.replace(self._ring, deployment=deployment)
            await ring.offered(1)
            yield ring
        finally:
            await admin.call("DeleteDeployment", name=name)

    async def clear(self) -> None:
        """Gives all nodes back."""
        if self._ring is not None:
            name, self._ring = self._ring.model, None
            await self.cluster.admin.call("DeleteDeployment", name=name)
            await self._stack.aclose()


class Reference:
    """The whole model in plain mlx_lm, greedy, one row; what it was asked once it remembers."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        from sealring.node.engine import import_whole  # which other tests of the process may have used

        tuned = None if adapter is None else str(adapter)
        self.model, self.tokenizer = import_whole().load(str(folder), adapter_path=tuned)
        self._replies: dict[str, Reply] = {}

    def reply(self, messages: list[dict[str, str]], max_tokens: int, *, kv_bits: int = 0) -> Reply:
        """With `kv_bits` by mlx-lm's own quantized caches, from the first token on."""
        asked = json.dumps([messages, max_tokens, kv_bits])
        if asked not in self._replies:
            self._replies[asked] = self._reply(messages, max_tokens, kv_bits)
        return self._replies[asked]

    def _reply(self, messages: list[dict[str, str]], max_tokens: int, kv_bits: int) -> Reply:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import QuantizedKVCache

        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens: list[int] = []
        reason = "FINISH_REASON_LENGTH"
        cache = [QuantizedKVCache(32, kv_bits) for _ in self.model.layers] if kv_bits else None
        for token, _ in generate_step(
            mx.array(prompt), self.model, max_tokens=max_tokens, prompt_cache=cache
        ):
            tokens.append(int(token))
            if token in self.tokenizer.eos_token_ids:
                reason = "FINISH_REASON_STOP"
                break
        shown = [token for token in tokens if token not in self.tokenizer.eos_token_ids]
        return Reply(self.tokenizer.decode(shown), len(prompt), len(tokens), reason)
