"""The figures of /metrics under the names that vLLM and llama-server have for them, so that dashboards which were made
for those servers show this one. What they have and this server has not is left out."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

OURS, VLLM, LLAMA = "graphrt:", "vllm:", "llamacpp:"
#: vLLM's names, which are ours.
_SAME = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
        *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "iteration_tokens_total"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens"),
        *("request_params_n", "request_success"),
    )
)
#: Its names of earlier versions, which dashboards still ask for.
_EARLIER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
#: Why a text ended, in its words. What isn't here is an error.
_REASONS = {"eog": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "abort"}
#: llama-server's names of counters and gauges.
_LLAMA = {
    "generation_tokens": "tokens_predicted",
    "num_requests_running": "requests_processing",
    "num_requests_waiting": "requests_deferred",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",
    "steps": "n_decode",
    "longest_text_tokens": "n_tokens_max",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
}


class OtherNames(Collector):
    """Tells what a registry has once more. model: the name that vLLM's figures have as a label."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def describe(self) -> list[Metric]:
        """Nothing is known before it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """By the figures as they are now."""
        found = {metric.name.removeprefix(OURS): metric for metric in self._registry.collect()}
        for name, metric in found.items():
            if name in _SAME:
                yield self._of_vllm(metric, name)
            if name in _EARLIER:
                yield self._of_vllm(metric, _EARLIER[name])
            if name in _LLAMA:
                yield _renamed(metric, LLAMA + _LLAMA[name])
        yield from _of_llama_server(found)

    def _of_vllm(self, metric: Metric, name: str) -> Metric:
        made = _renamed(metric, VLLM + name)
        labelled = [
            (sample.name, {**sample.labels, "model_name": self._model}, sample.value) for sample in made.samples
        ]
        made.samples = []
        if name != "request_success":
            for sample in labelled:
                made.add_sample(*sample)
            return made
        counts = dict.fromkeys((*_REASONS.values(), "error"), 0.0)
        for _, labels, value in labelled:
            counts[_REASONS.get(labels["finished_reason"], "error")] += value
        for reason, value in counts.items():
            made.add_sample(f"{made.name}_total", {"finished_reason": reason, "model_name": self._model}, value)
        return made


def _renamed(metric: Metric, name: str) -> Metric:
    made = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        made.add_sample(name + sample.name.removeprefix(metric.name), sample.labels, sample.value)
    return made


def _of_llama_server(found: dict[str, Metric]) -> Iterator[Metric]:
    """What it has as a figure of its own, and what follows here from several. It counts of prompts what was read."""

    def value(name: str, end: str = "_total") -> float:
        metric = found[name]
        return next((each.value for each in metric.samples if each.name == metric.name + end), 0.0)

    read, made = value("prompt_tokens") - value("prefix_cache_hits"), value("generation_tokens")
    reading, making = (value(f"request_{part}_time_seconds", "_sum") for part in ("prefill", "decode"))
    yield CounterMetricFamily(f"{LLAMA}prompt_tokens", "tokens of prompts that were read", value=read)
    yield CounterMetricFamily(f"{LLAMA}prompt_seconds", "reading prompts, of all texts together", value=reading)
    yield CounterMetricFamily(f"{LLAMA}tokens_predicted_seconds", "generating, of all texts together", value=making)
    for name, what, n, of in (
        ("prompt_tokens_seconds", "tokens of prompts read in a second of these", read, reading),
        ("predicted_tokens_seconds", "tokens generated in a second of these", made, making),
        ("n_busy_slots_per_decode", "texts that a step reads or generates", value("step_texts"), value("steps")),
    ):
        yield GaugeMetricFamily(LLAMA + name, what, value=n / of if of else 0.0)
