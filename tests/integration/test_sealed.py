"""Sealed prompts end to end: the same answers, a gateway that sees nothing, heads that take nothing else."""

import asyncio
import contextlib
import secrets
import sys
import time

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from capture import Capture, forms_of, found
from ringtest import MODEL, Ring, chat

from cli.cluster import LocalCluster
from cli.operator import read_bundle
from mesh.addresses import free_port
from mesh.envelope import RequestInfo, SealingKey, seal_request
from mesh.errors import FailedPrecondition, RosterError
from mesh.status import from_rpc_error
from sealring.client import AsyncClient, Client
from sealring.client.trust import RosterVerifier
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("integration"),
    pytest.mark.asyncio(loop_scope="module"),
]
QUESTION = "What is the capital of France?"


def messages(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def pin(ring):
    return read_bundle(ring.cluster.operator_bundle).root_sha256.hex()


@contextlib.asynccontextmanager
async def connect(ring, pin, **settings):
    async with AsyncClient(
        ring.cluster.grpc_address, **{"root_sha256": pin, "timeout": 60.0, **settings}
    ) as client:
        yield client


# The same answers


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.2, "seed": 42, "top_p": 0.95}, {"temperature": 0.8, "seed": 7, "top_k": 9}],
)
async def test_a_sealed_answer_is_the_clear_one_token_for_token(ring, pin, sampling):
    clear = await ring.ask(chat("Tell me about the planets.", **sampling), 40)
    async with connect(ring, pin) as client:
        reply = client.chat(messages("Tell me about the planets."), max_tokens=40, **sampling)
        deltas = [delta async for delta in reply]
    done = reply.completion
    assert "".join(delta.text for delta in deltas) == done.text == clear.text
    assert [delta.tokens for delta in deltas] == sorted({delta.tokens for delta in deltas})
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (
        clear.prompt_tokens,
        clear.completion_tokens,
    )
    assert clear.reason.endswith(done.finish_reason.upper())


async def test_the_answer_says_who_saw_the_prompt(ring, pin):
    async with connect(ring, pin) as client:
        done = await client.chat(messages(QUESTION), max_tokens=5)
        models = await client.models()
    assert done.finish_reason == "length"
    assert [one.rank for one in done.ring.members] == [0, 1, 2]
    assert done.ring.members[0].layers[0] == 0
    assert {(one.trust, one.level) for one in done.ring.members} == {(10, "software")}
    assert [(one.name, one.rings, one.min_trust) for one in models] == [("demo", 1, 10)]


async def test_text_without_limit_and_stop_strings(ring, pin):
    async with connect(ring, pin) as client:
        whole = (await client.chat(messages(QUESTION))).text
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        stopped = await client.chat(messages(QUESTION), stop=stop)
        text = await client.complete("The capital of", max_tokens=4)
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert text.usage.completion_tokens <= 4


async def test_sealed_and_clear_rows_share_a_batch(ring, pin):
    async with connect(ring, pin) as client:
        sealed = [client.chat(messages(f"What is {n}+{n}?"), max_tokens=20).result() for n in range(4)]
        clear = [ring.ask(chat(f"What is {n}+{n}?"), 20) for n in range(4)]
        answers = await asyncio.gather(*sealed, *clear)
    assert [one.text for one in answers[:4]] == [one.text for one in answers[4:]]


async def test_the_synchronous_client(ring, pin):
    def work():
        with Client(ring.cluster.grpc_address, root_sha256=pin) as client:
            reply = client.chat(messages(QUESTION), max_tokens=30)
            return "".join(delta.text for delta in reply), reply.completion

    text, done = await asyncio.to_thread(work)
    assert text == done.text == (await ring.ask(chat(QUESTION), 30)).text


async def test_leaving_a_sealed_answer_frees_its_row(ring, pin):
    async with connect(ring, pin) as client:
        async with client.chat(messages("List the months of the year.")) as reply:
            async for _ in reply:
                break
        await asyncio.sleep(1)
        async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=10) as http:
            metrics = (await http.get("/metrics")).text
        running = [line for line in metrics.splitlines() if line.startswith("sealring_num_requests_running")]
        assert [float(line.rsplit(" ", 1)[1]) for line in running] == [0.0]
        assert (await client.chat(messages(QUESTION), max_tokens=20)).text


# Refused by the client


async def test_a_wrong_root_and_too_high_a_trust_are_refused_before_anything_is_sent(ring, pin):
    port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        async with connect(ring, "00" * 32) as client:
            with pytest.raises(RosterError) as wrong_root:
                await client.chat(messages(QUESTION))
        async with connect(ring, pin) as client:
            with pytest.raises(FailedPrecondition) as untrusted:
                await client.chat(messages(QUESTION), min_trust=20)
        await asyncio.sleep(0.3)
    assert (wrong_root.value.reason, untrusted.value.reason) == ("ROOT_PIN", "TRUST_BELOW_FLOOR")
    sent = b"".join(bytes(data) for (_, target), data in capture.streams.items() if target == port)
    assert b"/sealring.v1.Inference/GetRoster" in sent
    assert b"/sealring.v1.Inference/Generate" not in sent


# Refused by the head


class Forger:
    """Seals by hand, so that everything can be wrong."""

    def __init__(self, ring, roster):
        self.ring, self.roster = ring, roster

    def request(self, *, key=None, bound=None, shown=None, **fields):
        ring = self.roster.rings[0]
        info = {
            "deployment": "demo",
            "request_id": secrets.token_bytes(16),
            "expires": int(time.time()) + 60,
            "roster_hash": self.roster.hash,
        }
        info |= bound or {}
        body = inference.SealedPrompt(prompt=chat(QUESTION), max_tokens=5)
        key = key or self.roster.member(ring.members[0].id).sealing_key
        sealed, _ = seal_request(key, RequestInfo(**info), body.SerializeToString())
        info.pop("deployment")
        sealed_for = inference.SealedFor(**{"ring": ring.id, **info, **(shown or {})})
        envelope = inference.Envelope(sealed=sealed, sealed_for=sealed_for)
        return inference.GenerateRequest(**{"model": "demo", "envelope": envelope, "max_tokens": 5, **fields})

    async def outcome(self, request):
        """The reason for which it is refused, or the number of sealed deltas."""
        deltas = 0
        try:
            async for response in self.ring.stub.Generate(request, timeout=60):
                if response.HasField("delta"):
                    assert response.delta.WhichOneof("content") == "sealed"
                    deltas += 1
        except grpc.RpcError as error:
            return from_rpc_error(error).reason
        return deltas


@pytest_asyncio.fixture(loop_scope="module")
async def forger(ring, pin):
    response = await ring.stub.GetRoster(inference.GetRosterRequest(), timeout=10)
    return Forger(ring, RosterVerifier(bytes.fromhex(pin)).verify(response))


async def test_a_request_id_is_taken_once(forger):
    request = forger.request()
    assert await forger.outcome(request) > 0
    assert await forger.outcome(request) == "ENVELOPE_REPLAYED"
    again = forger.request(bound={"request_id": request.envelope.sealed_for.request_id})
    assert await forger.outcome(again) == "ENVELOPE_REPLAYED"


async def test_an_envelope_outlives_nothing(forger):
    now = int(time.time())
    for expires in (now - 1, now + 7200):
        assert await forger.outcome(forger.request(bound={"expires": expires})) == "ENVELOPE_EXPIRED"
    longer = forger.request(shown={"expires": now + 120})
    assert await forger.outcome(longer) == "ENVELOPE_REFUSED"


async def test_an_envelope_for_another_head_is_refused(forger):
    tail = forger.roster.rings[0].members[-1].id
    for key in (forger.roster.member(tail).sealing_key, SealingKey().public_key):
        assert await forger.outcome(forger.request(key=key)) == "ENVELOPE_REFUSED"


async def test_what_was_sealed_cannot_be_changed_on_the_way(forger):
    good = forger.request()
    other_id = forger.request(shown={"request_id": bytes(16)})
    other_hash = forger.request(shown={"roster_hash": bytes(32)})
    sealed = good.envelope.sealed
    flipped = inference.GenerateRequest()
    flipped.CopyFrom(good)
    flipped.envelope.sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    expected = {
        "ENVELOPE_REFUSED": [flipped, other_id, forger.request(bound={"deployment": "other"})],
        "ENVELOPE_CHANGED": [forger.request(max_tokens=6), forger.request(max_tokens=0)],
        "SEALED_BY_OTHER_ROSTER": [other_hash, forger.request(bound={"roster_hash": bytes(32)})],
        "RING_GONE": [forger.request(shown={"ring": "demo-9"})],
        "BAD_REQUEST_INFO": [
            forger.request(shown={"ring": ""}),
            forger.request(shown={"request_id": b"short"}),
            forger.request(envelope=inference.Envelope(clear=chat(QUESTION), sealed_for={"ring": "demo-0"})),
        ],
    }
    for reason, requests in expected.items():
        for request in requests:
            assert await forger.outcome(request) == reason
    assert await forger.outcome(good) > 0


async def test_chunks_tell_no_lengths_of_tokens(forger):
    sizes = []
    async for response in forger.ring.stub.Generate(forger.request(), timeout=60):
        if response.HasField("delta"):
            sizes.append(len(response.delta.sealed))
    assert len(sizes) >= 3
    assert len(set(sizes[1:])) == 1, "every chunk but the first, which brings the key, has one length"


# The proxy


@contextlib.asynccontextmanager
async def proxy(ring, pin, folder, *options):
    """A running proxy: its URL and its process."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "proxy", "--gateway", ring.cluster.grpc_address, "--root", pin),
        *("--listen", f"127.0.0.1:{port}", "--state-file", str(folder / "roster-state"), *options),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            while b"proxy started" not in (line := await process.stderr.readline()):
                assert line, f"the proxy has ended: {await process.wait()}"
        drain = asyncio.create_task(process.stderr.read())
        yield f"http://127.0.0.1:{port}", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        await drain


async def test_the_openai_client_through_the_proxy(ring, pin, reference, tmp_path):
    port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    mark = "lambent ocelot trellis 40417 brocade"
    prompt = forms_of(mark, reference.tokenizer)
    expected = reference.reply(messages(QUESTION), 100)
    async with proxy(ring, pin, tmp_path) as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        stream = await client.chat.completions.create(
            model="demo",
            messages=messages(QUESTION),
            temperature=0,
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        with Capture() as capture:
            marked = await client.chat.completions.create(
                model="demo", messages=messages(f"Please repeat: {mark}"), temperature=0, max_tokens=30
            )
            await asyncio.sleep(0.5)
        models = await client.models.list()
        text = await client.completions.create(model="demo", prompt="The capital of", max_tokens=4)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=messages(QUESTION))
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(
                model="demo", messages=messages(QUESTION), extra_body={"min_trust": 20}
            )
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            health, metrics = await http.get("/health"), (await http.get("/metrics")).text
        await client.close()
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 3
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    assert chunks[-1].usage.completion_tokens == expected.completion_tokens
    assert marked.choices[0].message.content
    assert refused.value.code == "trust_below_floor"
    assert [model.id for model in models.data] == ["demo"]
    assert text.usage.completion_tokens <= 4
    assert health.status_code == 200
    assert f'sealring_prompt_tokens_total{{model_name="demo"}} {expected.prompt_tokens}' not in metrics
    assert 'model_name="demo"' in metrics
    assert 'model_name="other"' in metrics
    beyond = [bytes(data) for ports, data in capture.streams.items() if port in ports]
    assert sum(map(len, beyond)) > 1000
    assert {name for data in beyond for name in found(data, prompt)} == set()
    assert any("utf-8" in found(bytes(data), prompt) for data in capture.streams.values())


async def test_a_proxy_with_the_wrong_root_does_not_start(ring, tmp_path):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "proxy", "--gateway", ring.cluster.grpc_address, "--root", "ab" * 32),
        *("--listen", f"127.0.0.1:{free_port()}", "--state-file", str(tmp_path / "roster-state")),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"ROOT_PIN" in said


# Faults


async def test_a_head_with_a_new_sealing_key_is_found_by_itself(ring, pin):
    async with connect(ring, pin) as client:
        before = await client.chat(messages(QUESTION), max_tokens=20)
        name = node_of(ring.cluster, before.ring.members[0].id)
        await ring.cluster.kill_node(name)
        await ring.cluster.start_node(name)
        answers = await asyncio.gather(
            *(client.chat(messages(QUESTION), max_tokens=20).result() for _ in range(3)),
        )
    assert [one.text for one in answers] == [before.text] * 3


async def test_a_ring_that_is_lost_is_replaced_by_another_one(tmp_path):
    async with LocalCluster(tmp_path / "state", MODEL, nodes=2, name="demo") as cluster:
        await cluster.start()
        await cluster.deploy(stages=1, replicas=2)
        pin = read_bundle(cluster.operator_bundle).root_sha256
        async with AsyncClient(cluster.grpc_address, root_sha256=pin, timeout=60.0) as client:
            async with asyncio.timeout(30):
                while (await client.models())[0].rings < 2:
                    await asyncio.sleep(0.2)
            answers = await asyncio.gather(
                *(client.chat(messages(QUESTION), max_tokens=20).result() for _ in range(16))
            )
            assert len({one.text for one in answers}) == 1
            assert {one.ring.id for one in answers} == {"demo-0", "demo-1"}
            lost = answers[0].ring
            await cluster.kill_node(node_of(cluster, lost.members[0].id))
            later = await asyncio.gather(
                *(client.chat(messages(QUESTION), max_tokens=20).result() for _ in range(8))
            )
    assert {one.text for one in later} == {answers[0].text}
    assert lost.id not in {one.ring.id for one in later}


async def test_hybrid_sealing_keys_end_to_end(tmp_path):
    """ML-KEM-768 with X25519, in rosters and envelopes; both halves of the key are needed."""
    hybrid = {"node": {"hybrid_sealing_key": True}}
    async with LocalCluster(tmp_path / "state", MODEL, nodes=2, name="demo", settings=hybrid) as cluster:
        await cluster.start()
        await cluster.deploy(stages=2)
        pin = read_bundle(cluster.operator_bundle).root_sha256
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            ring = Ring(cluster, None, inference_pb2_grpc.InferenceStub(channel))
            clear = await ring.ask(chat(QUESTION), 20)
            async with AsyncClient(cluster.grpc_address, root_sha256=pin, timeout=60.0) as client:
                replies = [await client.chat(messages(QUESTION), max_tokens=20).result() for _ in range(2)]
            assert [one.text for one in replies] == [clear.text] * 2
            answer = await ring.stub.GetRoster(inference.GetRosterRequest(), timeout=10)
            forger = Forger(ring, RosterVerifier(pin).verify(answer))
            head, tail = (forger.roster.member(one.id).sealing_key for one in forger.roster.rings[0].members)
            assert {len(head), len(tail)} == {1184 + 32}
            assert await forger.outcome(forger.request()) > 0
            for key in (tail, head[:1184] + tail[1184:], tail[:1184] + head[1184:], head[1184:]):
                assert await forger.outcome(forger.request(key=key)) == "ENVELOPE_REFUSED"


def node_of(cluster, member):
    """The name of the node with this id."""
    folders = (cluster.state_dir / name for name in cluster.node_names)
    return next(folder.name for folder in folders if member in (folder / "member.json").read_text())
