"""Metrics of a gateway, under vLLM's names with our prefix. Labels are model names and fixed words."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sealring.mesh.errors import Cancelled, SealringError
from sealring.v1 import inference_pb2 as inference

_MODEL = ("model_name",)
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)
_LENGTHS = (1, 10, 50, 100, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNT_EVERY = 16
"""Tokens of a request between two additions to the counter of all."""

_REASONS = {inference.FINISH_REASON_STOP: "stop", inference.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class ModelLoad:
    """Load of all rings of a model: requests, tokens and bytes of kept prefixes, and the reserved part of KV
    memory on the fullest ring."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    kept_tokens: int = 0
    kept_bytes: int = 0


class RequestMetrics:
    """Observes one request from its arrival to its end."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived = time.perf_counter()
        self._last = 0.0
        self._tokens = 0
        self._counted = 0
        self._first = metrics.first_token.labels(model)
        self._between = metrics.between_tokens.labels(model)
        self._generated = metrics.generation_tokens.labels(model)
        self.ended = "abort"

    def event(self, event: inference.GenerateResponse, queued: float | None = None) -> None:
        """Counts an event. `queued` are the seconds that the request waited for its first step, if known."""
        kind = event.WhichOneof("event")
        if kind == "prefilling":
            pass
        elif kind == "delta" and event.delta.choice:
            pass  # the time between tokens is that of the first answer
        elif kind == "delta":
            self._delta(event.delta.tokens, time.perf_counter(), queued)
        elif kind == "started":
            self._metrics.prompt_tokens.labels(self._model).inc(event.started.prompt_tokens)
            self._metrics.prompt_length.labels(self._model).observe(event.started.prompt_tokens)
        else:
            self._count(event.finished.completion_tokens)
            self.ended = _REASONS.get(event.finished.reason, "other")
            self._metrics.answer_length.labels(self._model).observe(event.finished.completion_tokens)
            self._metrics.whole.labels(self._model).observe(time.perf_counter() - self._arrived)

    def _delta(self, tokens: int, now: float, queued: float | None) -> None:
        new = tokens - self._tokens
        if not self._last:
            self._first.observe(now - self._arrived)
            if queued is not None:
                self._metrics.queued.labels(self._model).observe(queued)
        elif new > 0:
            self._between.observe((now - self._last) / new)
        self._last = now
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        self._tokens = max(self._tokens, tokens)
        if self._tokens >= self._counted + _COUNT_EVERY:
            self.flush()

    def flush(self) -> None:
        """Adds the tokens that are not in the counter yet."""
        self._generated.inc(self._tokens - self._counted)
        self._counted = self._tokens


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"sealring_{name}", text, _MODEL, buckets=tuple(buckets), registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = _MODEL) -> Counter:
            return Counter(f"sealring_{name}", text, labels, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "arrival to first token", _FIRST)
        self.between_tokens = histogram("inter_token_latency_seconds", "between two tokens", _BETWEEN)
        self.whole = histogram("e2e_request_latency_seconds", "arrival to last token", _WHOLE)
        self.queued = histogram("request_queue_time_seconds", "arrival at a ring to first step", _FIRST)
        self.prompt_length = histogram("request_prompt_tokens", "tokens per prompt", _LENGTHS)
        self.answer_length = histogram("request_generation_tokens", "tokens per answer", _LENGTHS)
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens taken")
        self.generation_tokens = counter("generation_tokens", "tokens generated")
        self.ended = counter("request_success", "requests that ended", ("model_name", "finished_reason"))
        self.refused = counter("request_refused", "requests that failed", ("model_name", "code"))
        self.turned_away = counter("requests_turned_away", "requests that were not let in", ("reason",))
        self.prefix_queries = counter("prefix_cache_queries", "prompt tokens looked for in kept prefixes")
        self.prefix_hits = counter("prefix_cache_hits", "prompt tokens taken from kept prefixes")
        self.prefix_from_disk = counter("prefix_cache_disk_tokens", "tokens of prefixes read from disk")
        self.prefilled_idle = counter("idle_prefill_tokens", "tokens of next prompts prefilled by idle rings")
        self.drafted = counter("spec_decode_num_draft_tokens", "tokens guessed for answers that ended")
        self.accepted = counter("spec_decode_num_accepted_tokens", "of them, those that were right")
        self.routed = counter("requests_routed_by_key", "requests with a key for the choice of a ring")
        self.routed_hits = counter("routed_by_key_hits", "of those that finished, begun with a kept prefix")
        self.routed_away = counter("routed_by_key_moved", "of them, gone elsewhere because of load")
        self.steps = counter("steps", "steps announced")
        self.epochs_ended = counter("epochs_ended", "epochs lost")

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[RequestMetrics]:
        """Counts one request, however it ends."""
        observed = RequestMetrics(self, model)
        try:
            yield observed
        except SealringError as error:
            if not isinstance(error, Cancelled):
                observed.ended = ""
                self.refused.labels(model, error.code).inc()
            raise
        finally:
            observed.flush()
            if observed.ended:
                self.ended.labels(model, observed.ended).inc()

    def watch(self, loads: Callable[[], dict[str, ModelLoad]]) -> None:
        """Reads the gauges from `loads` at every scrape: by model."""
        self.registry.register(_Loads(loads))

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class _Loads(Collector):
    def __init__(self, loads: Callable[[], dict[str, ModelLoad]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily]:
        waiting = GaugeMetricFamily("sealring_num_requests_waiting", "requests waiting", labels=_MODEL)
        running = GaugeMetricFamily("sealring_num_requests_running", "requests running", labels=_MODEL)
        usage = GaugeMetricFamily("sealring_kv_cache_usage_perc", "KV memory reserved, 0 to 1", labels=_MODEL)
        tokens = GaugeMetricFamily("sealring_prefix_cache_tokens", "tokens of kept prefixes", labels=_MODEL)
        held = GaugeMetricFamily("sealring_prefix_cache_bytes", "their memory, on all members", labels=_MODEL)
        for model, load in self._loads().items():
            waiting.add_metric([model], load.waiting)
            running.add_metric([model], load.running)
            usage.add_metric([model], load.kv_usage)
            tokens.add_metric([model], load.kept_tokens)
            held.add_metric([model], load.kept_bytes)
        yield from (waiting, running, usage, tokens, held)
