"""Prometheus metrics: the engine's state at the time of the request, and statistics of requests.

Each that vLLM has too comes a second time under vLLM's name, so that its dashboards work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ridgeline.serve.detokenize import Delta
from ridgeline.serve.request import EngineRequest, Stats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(1 << i) for i in range(0, 18))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_VLLM = (
    ("waiting", "num_requests_waiting"), ("running", "num_requests_running"), ("kv_usage", "kv_cache_usage_perc"),
    ("kv_usage", "gpu_cache_usage_perc"), ("sought_tokens", "prompt_tokens"), ("sought_tokens", "prefix_cache_queries"),
    ("cached_tokens", "prefix_cache_hits"), ("generated_tokens", "generation_tokens"),
    ("preemptions", "num_preemptions"), ("requests_finished", "request_success"),
    ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    ("time_per_output_token_seconds", "time_per_output_token_seconds"),
    ("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    ("request_seconds", "e2e_request_latency_seconds"), ("request_prompt_tokens", "request_prompt_tokens"),
    ("request_generated_tokens", "request_generation_tokens"), ("inter_token_seconds", "inter_token_latency_seconds"),
    ("request_queue_seconds", "request_queue_time_seconds"),
    ("request_prefill_seconds", "request_prefill_time_seconds"),
    ("request_decode_seconds", "request_decode_time_seconds"),
    ("request_running_seconds", "request_inference_time_seconds"), ("request_outputs", "request_params_n"),
    ("request_max_tokens", "request_params_max_tokens"),
    ("request_generated_tokens", "request_max_num_generation_tokens"),
    ("request_preemptions", "request_num_preemptions"), ("step_tokens", "iteration_tokens_total"),
    ("requests_rejected", "admission_rejections"), ("waiting_by_reason", "num_requests_waiting_by_reason"),
    ("cache_config", "cache_config"),
)  # fmt: skip
"""(our name, vLLM's), without prefixes and suffixes. What newer versions of vLLM renamed has both names."""
_VLLM_LABELS = {"ridgeline_requests_finished": {"reason": "finished_reason"}}


class Metrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model = ""
        """Name of the served model."""

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ridgeline_{name}", what, buckets=buckets, registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"ridgeline_{name}", what, labels, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.per_token = histogram("time_per_output_token_seconds", "Mean time per token after the first.",
                                   _TOKEN_SECONDS)  # fmt: skip
        self.whole = histogram("request_seconds", "From arrival to the end.", _SECONDS)
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generated = histogram("request_generated_tokens", "Tokens of one output.", _TOKENS)
        self.gap = histogram("inter_token_seconds", "Between two tokens of an output.", _TOKEN_SECONDS)
        self.queued = histogram("request_queue_seconds", "From arrival until it was scheduled.", _SECONDS)
        self.prefill = histogram("request_prefill_seconds", "From then to the first token.", _SECONDS)
        self.decode = histogram("request_decode_seconds", "From the first token to the last.", _SECONDS)
        self.running = histogram("request_running_seconds", "From when it was scheduled to the last token.", _SECONDS)
        self.outputs = histogram("request_outputs", "Outputs that a request asks for.", _COUNTS)
        self.most = histogram("request_max_tokens", "Tokens that an output may have.", _TOKENS)
        self.preempted = histogram("request_preemptions", "How often a request was put back.", (0.0, *_COUNTS))
        self.step = histogram("step_tokens", "Tokens that one step read, found in the cache and generated.", _TOKENS)
        self.tokens = counter("output_tokens", "Tokens sent to clients.")
        self.finished = counter("requests_finished", "Requests by how they ended.", "reason")
        self.rejected = counter("requests_rejected", "Requests refused because the queue was full.")
        self.disconnected = counter("requests_disconnected", "Requests whose client went away.")

    def watch(
        self, stats: Callable[[], Stats], queued: Callable[[], tuple[int, int]], cache: Mapping[str, str]
    ) -> None:
        """Read the engine's state whenever metrics are requested; ``cache`` is what does not change of its cache."""
        self.registry.register(_State(stats, queued, cache))

    def output(self, delta: Delta, first: float, now: float) -> None:
        """One output has ended, whose request saw its first token at ``first``."""
        self.generated.observe(delta.generated)
        if delta.generated > 1:
            self.per_token.observe((now - first) / (delta.generated - 1))

    def request(self, delta: Delta, asked: EngineRequest, times: tuple[float, float, float, float]) -> None:
        """A request has ended, with its last delta; ``times``: it came, was scheduled, had its first and last token."""
        came, scheduled, first, last = times
        self.whole.observe(last - came)
        for histogram, seconds in ((self.queued, scheduled - came), (self.prefill, first - scheduled),
                                   (self.decode, last - first), (self.running, last - scheduled)):  # fmt: skip
            histogram.observe(max(0.0, seconds))
        self.prompt.observe(len(asked.prompt))
        self.preempted.observe(delta.preemptions)
        if not asked.embed:
            self.outputs.observe(asked.sampling.n)
            self.most.observe(asked.sampling.max_tokens)
        self.finished.labels(delta.finish).inc()

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry) + generate_latest(_AsInVllm(self))


class _AsInVllm:
    """Our metrics under vLLM's names, labeled with the model's."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        model = {"model_name": self.metrics.model}
        families = {family.name: family for family in self.metrics.registry.collect()}
        for ours, name in ((f"ridgeline_{ours}", name) for ours, name in _VLLM if f"ridgeline_{ours}" in families):
            family = families[ours]
            renamed = Metric(f"vllm:{name}", family.documentation, family.type)
            for sample in family.samples:
                labels = {_VLLM_LABELS.get(ours, {}).get(key, key): value for key, value in sample.labels.items()}
                full = f"vllm:{name}{sample.name.removeprefix(ours)}"
                renamed.samples.append(Sample(full, {**model, **labels}, sample.value, sample.timestamp))
            yield renamed


class _State:
    """The engine's counters as Prometheus families."""

    def __init__(
        self, stats: Callable[[], Stats], queued: Callable[[], tuple[int, int]], cache: Mapping[str, str]
    ) -> None:
        self._stats, self._queued, self._cache = stats, queued, cache

    def collect(self) -> Iterator[Any]:
        s, (requests, tokens) = self._stats(), self._queued()
        for name, value, what in (
            ("waiting", s.waiting, "Requests that the scheduler has not started."),
            ("running", s.running, "Sequences in the batch."),
            ("queued_requests", requests, "Sequences that have not been scheduled."),
            ("queued_tokens", tokens, "Prompt tokens of those."),
            ("kv_blocks", s.blocks, "Blocks of the key/value pool."),
            ("kv_blocks_used", s.blocks_used, "Blocks that sequences hold."),
            ("kv_blocks_cached", s.blocks_cached, "Free blocks kept for their contents."),
            ("kv_usage", s.blocks_used / max(1, s.blocks), "Fraction of the blocks that sequences hold."),
        ):
            yield GaugeMetricFamily(f"ridgeline_{name}", what, value)
        reasons = GaugeMetricFamily("ridgeline_waiting_by_reason", "Waiting requests, by why.", labels=["reason"])
        reasons.add_metric(["capacity"], s.waiting)
        yield reasons
        yield InfoMetricFamily("ridgeline_cache_config", "The key/value pool.", dict(self._cache))
        for name, value, what in (
            ("prompt_tokens", s.prompt_tokens, "Prompt tokens computed."),
            ("cached_tokens", s.cached_tokens, "Prompt tokens found in the cache."),
            ("sought_tokens", s.prompt_tokens + s.cached_tokens, "Prompt tokens computed or found in the cache."),
            ("generated_tokens", s.generated_tokens, "Tokens generated."),
            ("preemptions", s.preemptions, "Sequences put back for want of blocks."),
            ("steps", s.steps, "Engine steps."),
            ("drafted_tokens", s.drafted_tokens, "Tokens drafted."),
            ("saved_blocks", s.saved_blocks, "Cache blocks that the pool dropped and a store kept."),
            ("restored_blocks", s.restored_blocks, "Cache blocks that came back from the store."),
            ("accepted_tokens", s.accepted_tokens, "Drafted tokens that were right."),
        ):
            yield CounterMetricFamily(f"ridgeline_{name}", what, value)
