"""The whole gateway against a played cluster: attach, answer, lose members, refuse impostors, stop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import structlog
from edgecert import write_edge_certificate
from guarded import modules
from patience import PATIENCE_SECONDS, until

from sealring.client import AsyncClient
from sealring.edge.access.keyfile import LAN_FOLDER, KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.inference import timings
from sealring.gateway.lan.certificate import ROOT_FILE
from sealring.gateway.main import serve
from sealring.gateway.rings import watch
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.clock import SKEW_SECONDS, Clock, wall_clock
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.member import ROSTER, load_machine_state
from sealring.mesh.pki import Role, encode_chain, role_server_name
from sealring.mesh.rpc import channel_options, from_rpc_error, secure_channel
from sealring.mesh.system.addresses import free_port
from sealring.mesh.system.files import write_atomic
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc
from sealring.v1 import membership_pb2 as membership


class Running:
    """A gateway under test and clients of it."""

    def __init__(
        self, address: str, stub: Any, http: httpx.AsyncClient, stop: asyncio.Event, task: Any
    ) -> None:
        self.address = address
        self.stub = stub
        self.http = http
        self.stop = stop
        self.task = task

    async def ask(
        self, text: str, seconds: float = PATIENCE_SECONDS, **fields: Any
    ) -> tuple[str, inference.Finished, inference.Started]:
        parts = []
        try:
            async for event in self.stub.Generate(ask(text, **fields), timeout=seconds):
                parts.append(event)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        assert parts[0].WhichOneof("event") == "started"
        assert parts[-1].WhichOneof("event") == "finished"
        return "".join(part.delta.text for part in parts), parts[-1].finished, parts[0].started

    async def ready(self, rings: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                models = (await self.stub.ListModels(inference.ListModelsRequest())).models
                if sum(model.rings for model in models) == rings:
                    return
                await asyncio.sleep(0.02)


def ask(text: str, **fields: Any) -> inference.GenerateRequest:
    prompt = inference.Prompt(text=text)
    return inference.GenerateRequest(
        **{"model": "echo", "envelope": inference.Envelope(clear=prompt), **fields}
    )


@contextlib.asynccontextmanager
async def running(cluster: Any, clock: Clock = wall_clock, **settings: Any) -> AsyncIterator[Running]:
    http_port, grpc_port = free_port(), free_port()
    chosen = GatewaySettings(
        state_dir=cluster.state_dir,
        http_listen=f"127.0.0.1:{http_port}",
        grpc_listen=f"127.0.0.1:{grpc_port}",
        drain_timeout=2.0,
        **settings,
    )
    stop = asyncio.Event()
    task = asyncio.create_task(serve(chosen, stop, clock=clock))
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=PATIENCE_SECONDS) as http,
    ):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await channel.channel_ready()
        try:
            address = f"127.0.0.1:{grpc_port}"
            yield Running(address, inference_grpc.InferenceStub(channel), http, stop, task)
        finally:
            stop.set()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await task


@pytest.fixture
async def cluster(make_cluster: Callable[..., Any]) -> Any:
    return await make_cluster(3)


async def test_answers_over_grpc_and_http(cluster: Any) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        text, finished, started = await gateway.ask("one two three")
        assert text == "one two three "
        assert finished == inference.Finished(
            reason=inference.FINISH_REASON_STOP, prompt_tokens=3, completion_tokens=3
        )
        assert (started.ring, started.min_trust, started.prompt_tokens) == ("ring-0", 10, 3)
        answer = await gateway.http.post(
            "/v1/completions", json={"model": "echo", "prompt": "a b c d", "max_tokens": 2}
        )
        assert answer.json()["choices"][0]["text"] == "a b "
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        roster = await gateway.stub.GetRoster(inference.GetRosterRequest(), timeout=PATIENCE_SECONDS)
        assert roster.roster
        assert roster.root_metadata == encode_chain(cluster.authority.root.chain)
        (model,) = (await gateway.stub.ListModels(inference.ListModelsRequest())).models
        assert (model.name, model.model_type) == ("echo", "llama")
        metrics = (await gateway.http.get("/metrics")).text
        assert 'sealring_request_success_total{finished_reason="stop",model_name="echo"} 1.0' in metrics
        assert 'sealring_num_requests_running{model_name="echo"} 0.0' in metrics
        assert 'sealring_generation_tokens_total{model_name="echo"} 5.0' in metrics
    assert cluster.ring.goodbyes
    assert cluster.ring.composition.rows == 0


async def test_usage_is_counted_kept_and_bounded_by_quotas(cluster: Any) -> None:
    keys = KeyFile(cluster.state_dir)
    text, record = keys.create([Scope.INFERENCE], label="laptop", tokens_a_day=7)
    watcher, _ = keys.create([Scope.READ])

    async def used(gateway: Running) -> inference.GetUsageResponse:
        metadata = (("authorization", f"Bearer {watcher}"),)
        asked = inference.GetUsageRequest()
        found: inference.GetUsageResponse = await gateway.stub.GetUsage(asked, metadata=metadata)
        return found

    async def ask_over_http(gateway: Running) -> httpx.Response:
        body = {"model": "echo", "prompt": "one two three"}
        return await gateway.http.post(
            "/v1/completions", json=body, headers={"authorization": f"Bearer {text}"}
        )

    async with running(cluster) as gateway:
        await until(lambda: bool(cluster.ring.streams))
        assert (await ask_over_http(gateway)).is_success
        with pytest.raises(grpc.RpcError, match="scope read"):
            await gateway.stub.GetUsage(
                inference.GetUsageRequest(), metadata=(("authorization", f"Bearer {text}"),)
            )
        cluster.ring.hold = True
        leaves = asyncio.create_task(ask_over_http(gateway))
        await until(lambda: ["one", "two", "three"] in cluster.ring.answers.values())
        await until(lambda: bool(cluster.ring.held))
        leaves.cancel()
        while sum(one.requests for one in (await used(gateway)).usage) < 2:
            await asyncio.sleep(0.02)
        cluster.ring.hold = False
        cluster.ring.release()
        (one,) = (await used(gateway)).usage
        assert (one.key, one.model, one.requests) == (record.id, "echo", 2)
        assert (one.prompt_tokens, one.cached_tokens, one.answered_tokens) == (6, 0, 3)
        refused = await ask_over_http(gateway)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert 0 < int(refused.headers["retry-after"]) <= 25 * 3600
        metrics = await gateway.http.get("/metrics", headers={"authorization": f"Bearer {watcher}"})
        assert f'sealring_key_tokens_today{{key="{record.id}",name=""}} 9.0' in metrics.text
    async with running(cluster) as gateway:
        assert (await ask_over_http(gateway)).status_code == 429
        told = await used(gateway)
        assert list(told.usage) == [one]
        assert [(each.label, each.tokens_a_day, each.tokens_today) for each in told.keys if each.label] == [
            ("laptop", 7, 9)
        ]
    written = b"".join(file.read_bytes() for file in cluster.state_dir.glob("usage*"))
    assert b"three" not in written


async def test_errors_of_the_input(cluster: Any) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        for fields, code, reason in [
            ({"model": "nope"}, "NOT_FOUND", "MODEL_NOT_FOUND"),
            ({"request_id": "a b"}, "INVALID_ARGUMENT", "BAD_REQUEST_ID"),
            ({"min_trust": 20}, "FAILED_PRECONDITION", "TRUST_BELOW_FLOOR"),
            ({"envelope": inference.Envelope()}, "INVALID_ARGUMENT", "EMPTY_ENVELOPE"),
        ]:
            with pytest.raises(SealringError) as caught:
                await gateway.ask("x", **fields)
            assert (caught.value.code, caught.value.reason) == (code, reason)
        with pytest.raises(SealringError) as caught:
            await gateway.ask("w " * 600)
        assert caught.value.reason == "CONTEXT_TOO_LONG"
        assert (await gateway.ask("still here", model=""))[0] == "still here "


async def test_a_lost_epoch_is_a_pause(cluster: Any) -> None:
    """For what streamed as for what waited."""
    said = " ".join(f"w{number}" for number in range(400))
    async with running(cluster) as gateway:
        await gateway.ready()
        streaming = aiter(gateway.stub.Generate(ask(said)))
        events = [await anext(streaming) for _ in range(3)]
        cluster.ring.hold = True
        waiting = asyncio.create_task(gateway.ask("a b c"))
        await until(lambda: ["a", "b", "c"] in cluster.ring.answers.values())
        cluster.ring.hold = False
        cluster.ring.next_epoch()
        cluster.serve()
        events += [event async for event in streaming]
        assert "".join(event.delta.text for event in events).split() == said.split()
        finished = events[-1].finished
        assert (finished.prompt_tokens, finished.completion_tokens) == (400, 400)
        assert (await waiting)[0] == "a b c "


async def test_an_impostor_is_not_given_anything(make_cluster: Callable[..., Any]) -> None:
    cluster = await make_cluster(2, impostor=1)
    with structlog.testing.capture_logs() as logs:
        async with running(cluster) as gateway:
            await until(lambda: len(lost(logs)) > 1)
            await gateway.ready(0)
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in gateway.stub.Generate(ask("x"), timeout=0.5):
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert not any(cluster.ring.steps.values())


def lost(logs: list[Any]) -> list[str]:
    """Why the ring was, as often as it was tried."""
    return [one["reason"] for one in logs if one["event"] == "ring_lost"]


@pytest.mark.parametrize("downgrade", [False, True])
async def test_a_member_without_its_identity_key_is_not_given_anything(
    make_cluster: Callable[..., Any], downgrade: bool
) -> None:
    """The authority's key makes a certificate for its name; it cannot prove to be it, or does not try to."""
    cluster = await make_cluster(2, thief=0)
    cluster.ring.proves = not downgrade
    with structlog.testing.capture_logs() as logs:
        async with running(cluster) as gateway:
            await until(lambda: len(lost(logs)) > 1)
            await gateway.ready(0)
            assert 0 not in cluster.ring.believed
            assert not any(cluster.ring.steps.values())
    assert set(lost(logs)) == {"NO_PROOF" if downgrade else "BAD_PROOF"}


async def test_rosters_that_do_not_hold_are_not_used(cluster: Any) -> None:
    old = cluster.sign()
    with structlog.testing.capture_logs() as logs:
        async with running(cluster) as gateway:
            await gateway.ready()
            cluster.publish()
            cluster.publish_raw(old)
            cluster.publish_raw(b"nonsense")
            cluster.publish()
            while (await gateway.ask("x"))[2].roster_version < cluster.version:
                pass
    reasons = [one["reason"] for one in logs if one["event"] == "roster_refused"]
    assert reasons == ["ROSTER_ROLLBACK", "ENVELOPE_MALFORMED"]


async def test_a_ring_that_leaves_the_roster_is_left(cluster: Any) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        cluster.serve(patience=3)
        cluster.publish(rings=())
        await gateway.ready(0)
        waiting = asyncio.create_task(gateway.ask("waits"))
        refused = "DEADLINE_EXCEEDED"
        while refused == "DEADLINE_EXCEEDED":  # as long as its patience lasts
            with pytest.raises(SealringError) as caught:
                await gateway.ask("x", seconds=0.5)
            refused = caught.value.reason
        assert refused == "RING_DOWN", "the coordinator still plans it"
        body = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert (await gateway.http.get("/health")).status_code == 503
        cluster.publish()
        assert (await waiting)[0] == "waits ", "it was accepted"


async def test_an_expired_roster_is_a_pause(cluster: Any) -> None:
    """An answer that streams waits, and nothing is computed, until the roster is renewed. A new request is
    refused, because this gateway's clock is wrong."""
    said = " ".join(f"w{number}" for number in range(400))
    ahead = 0.0
    async with running(cluster, clock=lambda: time.time() + ahead) as gateway:
        await gateway.ready()
        cluster.ring.hold = True
        streaming = asyncio.create_task(gateway.ask(said))
        await until(lambda: len(cluster.ring.answers) == 1)
        ahead = 600.0 + SKEW_SECONDS
        await gateway.ready(0)
        with pytest.raises(Unavailable) as caught:
            await gateway.ask("came later")
        assert caught.value.reason == "ROSTER_EXPIRED"
        cluster.ring.next_epoch()
        cluster.ring.hold = False
        cluster.serve()
        done, _ = await asyncio.wait((streaming,), timeout=0.5)
        assert not done
        assert not any(cluster.ring.steps.values())
        ahead = 0.0
        cluster.publish()
        assert (await streaming)[0].split() == said.split()
        assert (await gateway.ask("came later"))[0] == "came later "


async def test_a_gateway_that_starts_with_an_expired_roster_lets_requests_wait(cluster: Any) -> None:
    write_atomic(cluster.state_dir / ROSTER, cluster.sign(ago=3600))
    del cluster.coordinator.snapshot["roster"]
    async with running(cluster) as gateway:
        answer = asyncio.create_task(gateway.ask("waits"))
        done, _ = await asyncio.wait((answer,), timeout=0.5)
        assert not done
        cluster.publish()
        assert (await answer)[0] == "waits "


async def test_a_ring_that_is_down_is_left_and_taken_up_again(cluster: Any) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        cluster.serve(membership.RING_PHASE_DOWN)
        await gateway.ready(0)
        answer = asyncio.create_task(gateway.ask("later"))
        await asyncio.sleep(0.1)
        cluster.serve()
        assert (await answer)[0] == "later "


async def test_a_thrown_out_gateway_ends(cluster: Any) -> None:
    with pytest.raises(SealringError) as caught:
        async with running(cluster) as gateway:
            await gateway.ready()
            cluster.publish(gateways=())
            await asyncio.wait([gateway.task], timeout=100)
    assert caught.value.reason == "REMOVED"


async def test_ports_and_state_in_use(cluster: Any) -> None:
    async with running(cluster):
        pass
    port = free_port()
    settings = GatewaySettings(
        state_dir=cluster.state_dir, http_listen=f"127.0.0.1:{port}", grpc_listen="127.0.0.1:0"
    )
    blocker = await asyncio.start_server(lambda r, w: None, "127.0.0.1", port)
    with pytest.raises(ConfigError) as caught:
        await serve(settings, asyncio.Event())
    assert caught.value.reason == "CANNOT_LISTEN"
    assert str(port) in caught.value.message
    blocker.close()
    settings = GatewaySettings(
        state_dir=cluster.state_dir, http_listen="127.0.0.1:0", grpc_listen=f"127.0.0.1:{port}"
    )
    blocker = await asyncio.start_server(lambda r, w: None, "127.0.0.1", port)
    with pytest.raises(ConfigError) as caught:
        await serve(settings, asyncio.Event())
    assert caught.value.reason == "CANNOT_LISTEN"
    blocker.close()


async def test_no_content_reaches_a_log(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        await gateway.ask("MARKED words")
        with pytest.raises(SealringError):
            await gateway.ask("MARKED " * 600)
        await gateway.http.post("/v1/completions", json={"model": "echo", "prompt": "MARKED", "MARKED": 1})
        await gateway.http.post("/v1/completions", content=b'{"MARKED": "\xff')
        cluster.ring.next_epoch()
        await gateway.ready(0)
        metrics = (await gateway.http.get("/metrics")).text
    out, err = capfd.readouterr()
    assert "MARKED" not in out + err + metrics


async def test_certificates_are_renewed_at_half_life(make_cluster: Callable[..., Any]) -> None:
    cluster = await make_cluster(2, lifetime=120)
    before = (cluster.state_dir / "tls.pem").read_bytes()
    async with running(cluster) as gateway:
        await gateway.ready()
        await until(lambda: (cluster.state_dir / "tls.pem").read_bytes() != before)
        assert (await gateway.ask("still the same epoch"))[0] == "still the same epoch "
        assert not cluster.ring.goodbyes
    load_machine_state(cluster.state_dir)


def test_the_gateway_is_light() -> None:
    code = "import sys, sealring.gateway.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    heavy = modules("mlx", "mlx_lm", "numpy", "transformers", "sealring.node", "sealring.coordinator")
    assert not set(done.stdout.split()) & heavy


async def test_beyond_loopback_there_must_be_a_key(cluster: Any, tmp_path: Path) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    settings = GatewaySettings(
        state_dir=cluster.state_dir,
        http_listen="192.0.2.1:80",
        http_tls_certificate=certificate,
        http_tls_key=key,
        grpc_listen="127.0.0.1:0",
    )
    keys = KeyFile(cluster.state_dir)
    with pytest.raises(ConfigError) as caught:
        await serve(settings, asyncio.Event())
    assert caught.value.reason == "NO_KEYS"
    keys.revoke(keys.create([Scope.INFERENCE])[1].id)
    with pytest.raises(ConfigError) as revoked:
        await serve(settings, asyncio.Event())
    assert revoked.value.reason == "NO_KEYS"
    keys.create([Scope.INFERENCE])
    with pytest.raises(ConfigError) as elsewhere:
        await serve(settings, asyncio.Event())
    assert elsewhere.value.reason == "CANNOT_LISTEN"


async def test_keys_come_and_go_in_a_running_gateway(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(cluster) as gateway:
        await gateway.ready()
        keys = KeyFile(cluster.state_dir)
        text, record = keys.create([Scope.INFERENCE, Scope.READ])
        with pytest.raises(SealringError) as caught:
            await gateway.ask("x")
        assert caught.value.reason == "INVALID_API_KEY"
        metadata = [("authorization", f"Bearer {text}")]
        call = gateway.stub.Generate(ask("a b"), timeout=100, metadata=metadata)
        assert "".join([event.delta.text async for event in call]) == "a b "
        pin = load_machine_state(cluster.state_dir).root_sha256
        async with AsyncClient(gateway.address, root_sha256=pin, api_key=text) as sealing:
            assert [ring.deployment for ring in await sealing.rings()] == ["echo"]
        assert (await gateway.http.get("/metrics")).status_code == 401
        headers = {"authorization": f"Bearer {text}"}
        metrics = (await gateway.http.get("/metrics", headers=headers)).text
        assert 'sealring_requests_turned_away_total{reason="INVALID_API_KEY"} 2.0' in metrics
        keys.revoke(record.id)
        assert (await gateway.http.get("/metrics", headers=headers)).status_code == 401
    assert keys.read()[record.id].last_used
    out, err = capfd.readouterr()
    assert text.rpartition("_")[2] not in out + err + metrics
    assert not any(
        text.rpartition("_")[2].encode() in file.read_bytes()
        for file in cluster.state_dir.iterdir()
        if file.is_file()
    )


async def test_a_members_program_sees_how_far_its_own_prompt_is(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the port for members as at any other: if it asks for that, before any text, and never of another's
    prompt."""
    monkeypatch.setattr(timings, "PREFILL_SECONDS", 0.0)
    port = free_port()
    async with running(cluster, members_listen=f"127.0.0.1:{port}") as gateway:
        await gateway.ready()
        one, other = (
            secure_channel(
                f"127.0.0.1:{port}",
                cluster.material(cluster.peer(signer, Role.CLIENT)),
                channel_options(role_server_name(Role.GATEWAY)),
            )
            for signer in cluster.members[:2]
        )

        async def told(channel: Any, words: int, *, wanted: bool) -> list[inference.GenerateResponse]:
            asked = ask("w " * words, tell_prefill=wanted)
            call = inference_grpc.InferenceStub(channel).Generate(asked, timeout=PATIENCE_SECONDS)
            return [event async for event in call]

        async with one, other:
            cluster.ring.hold = True
            asking = [
                asyncio.create_task(told(one, 100, wanted=True)),
                asyncio.create_task(told(other, 60, wanted=True)),
                asyncio.create_task(told(other, 80, wanted=False)),
            ]
            await until(lambda: len(cluster.ring.answers) == 3)
            cluster.ring.hold = False
            cluster.ring.release()
            found = await asyncio.gather(*asking)
    for events, words, wanted in zip(found, (100, 60, 80), (True, True, False), strict=True):
        kinds = [event.WhichOneof("event") for event in events]
        told_at = [at for at, kind in enumerate(kinds) if kind == "prefilling"]
        assert bool(told_at) == wanted
        assert all(at < kinds.index("delta") for at in told_at)
        assert {events[at].prefilling.prompt_tokens for at in told_at} <= {words}


async def test_the_lan_door_needs_a_key_and_leaves_loopback_as_it_is(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator knows of it while it is open. Usage has the labels of its keys."""
    monkeypatch.setattr(watch, "_DOOR_SECONDS", 0.0)
    takes = membership.WatchResponse(all_told=membership.AllTold(doors=True))
    folder, port = cluster.state_dir / LAN_FOLDER, free_port()
    key, record = KeyFile(folder).create([Scope.INFERENCE], label="phone")
    async with running(cluster, lan_listen=f"127.0.0.1:{port}") as gateway:
        await gateway.ready()
        cluster.coordinator.tell(takes)
        while (await cluster.coordinator.told.get()).door.lan != [f"127.0.0.1:{port}"]:
            pass
        asked = {"model": "echo", "prompt": "a b c d"}
        url = f"https://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, verify=str(folder / ROOT_FILE), timeout=60) as phone:
            assert (await phone.post("/v1/completions", json=asked)).status_code == 401
            phone.headers["authorization"] = f"Bearer {key}"
            answer = (await phone.post("/v1/completions", json=asked)).json()
            assert answer["choices"][0]["text"] == "a b c d "
        assert (await gateway.http.post("/v1/completions", json=asked)).status_code == 200
        told = await gateway.stub.GetUsage(inference.GetUsageRequest())
        assert {one.key: one.label for one in told.keys} == {record.id: "phone"}
        assert {one.key for one in told.usage} == {record.id, ""}
        KeyFile(folder).revoke(record.id)
        while (await cluster.coordinator.told.get()).door.lan:
            pass
        assert (await gateway.http.post("/v1/completions", json=asked)).status_code == 200
