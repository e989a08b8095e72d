"""/metrics under the names of other servers: what dashboards ask for is there, and says the same."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.served import Served

from graphrt.models.generation import Piece
from graphrt.tools.serve.events import Cancelled, Event, Text
from graphrt.tools.serve.metrics import Metrics
from graphrt.tools.serve.scheduler import Counts, Scheduler

#: What vLLM's own Grafana dashboards ask for, of this and of earlier versions, and llama-server's README has.
DASHBOARDS = frozenset(re.findall(r"\S+", """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:time_per_output_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:gpu_cache_usage_perc vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_inference_time_seconds_sum vllm:request_max_num_generation_tokens_sum vllm:iteration_tokens_total_bucket
vllm:request_time_per_output_token_seconds_sum vllm:request_params_max_tokens_sum vllm:request_params_n_sum
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:num_preemptions_total
vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
llamacpp:prompt_tokens_total llamacpp:prompt_seconds_total llamacpp:prompt_tokens_seconds
llamacpp:tokens_predicted_total llamacpp:tokens_predicted_seconds_total llamacpp:predicted_tokens_seconds
llamacpp:requests_processing llamacpp:requests_deferred llamacpp:n_tokens_max llamacpp:n_decode_total
llamacpp:n_busy_slots_per_decode llamacpp:kv_cache_usage_ratio llamacpp:spec_decode_num_draft_tokens_total
llamacpp:spec_decode_num_accepted_tokens_total llamacpp:spec_decode_num_drafts_total
"""))  # fmt: skip


def told(text: str, model: str) -> dict[str, float]:
    """Figures by their names, with why texts ended; those of histograms without their ranges."""
    found = dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == model, sample
            name = "/".join([sample.name, *(value for label, value in labels.items() if label != "le")])
            assert labels.get("le") or name not in found, f"{name} is told twice"
            found[name] = sample.value
    return found


def test_a_server_has_what_dashboards_ask_for(served: Served) -> None:
    http = httpx2.Client(base_url=served.url, timeout=60)
    before = told(http.get("/metrics").text, "tiny")
    names = {name.partition("/")[0] for name in before}
    assert names >= DASHBOARDS
    body = {"prompt": "the sea in the rain " * 20, "max_tokens": 5, "n": 2, "ignore_eos": True}
    read = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    again = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again > 0
    after = told(http.get("/metrics").text, "tiny")
    more = {name: after[name] - before.get(name, 0) for name in after}
    # of two choices the second takes over what the first has read, all but its prompt's last piece
    assert more["vllm:prompt_tokens_total"] == more["vllm:prefix_cache_queries_total"] == 4 * read
    assert more["vllm:prefix_cache_hits_total"] >= 3 * again
    assert more["llamacpp:prompt_tokens_total"] == 4 * read - more["vllm:prefix_cache_hits_total"]
    assert more["llamacpp:tokens_predicted_total"] == more["vllm:request_generation_tokens_sum"] == 20
    assert more["vllm:request_success_total/length"] == more["vllm:request_prompt_tokens_count"] == 4
    assert more["vllm:request_params_n_count"] == more["vllm:request_max_num_generation_tokens_count"] == 2
    assert more["vllm:request_params_n_sum"] == 4 and more["vllm:request_params_max_tokens_sum"] == 20
    assert more["llamacpp:n_decode_total"] >= 10 and 1 <= after["llamacpp:n_busy_slots_per_decode"] <= 6
    assert after["llamacpp:n_tokens_max"] >= read + 5
    assert 0 < more["vllm:request_decode_time_seconds_sum"] < more["vllm:request_inference_time_seconds_sum"]


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of three tokens, another one of its prompt, and one that was cancelled before it began."""

    def text(n_made: int, leader: Text | None = None, **more: Any) -> Text:
        made = Text([5, 6], 3, cast(Any, None), cast(Any, None), leader=leader, n_choices=2, **more)
        made.came, made.read, made.began, made.last = 1.0, 2.0, 4.0, 4.0 + 3 * (n_made - 1)
        made.tokens = [5, 6] + [7] * n_made
        return made

    metrics, first = Metrics("m"), text(3)
    other, gone = text(1, first), Text([5], -1, cast(Any, None), cast(Any, None), came=1.0, tokens=[5])
    for now, event in (
        (4.0, Event(first, Piece(7, "a"))), (7.0, Event(first, Piece(7, "a"))),
        (10.0, Event(first, Piece(7, "a", "length"))), (10.0, Event(other, Piece(7, "", "eog"))),
        (11.0, Event(gone, None, Cancelled("x"))),
    ):  # fmt: skip
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        metrics.tell([event])
    counts = Counts(
        prompt_tokens=5, looked_up_tokens=4, cached_tokens=2, made_tokens=4, steps=4, busy_texts=6, guesses=3
    )
    scheduler = SimpleNamespace(
        counts=counts, pages=(1, 4), running={0: first}, waiting=[], engine=SimpleNamespace(n_prepared=0)
    )
    found = told(metrics.text(cast(Scheduler, scheduler)).decode(), "m")
    for name, wanted in {
        "vllm:request_decode_time_seconds_sum": 6, "vllm:request_inference_time_seconds_sum": 8 + 2,
        "vllm:request_inference_time_seconds_count": 2, "vllm:request_time_per_output_token_seconds_sum": 3,
        "vllm:request_time_per_output_token_seconds_count": 1, "vllm:time_per_output_token_seconds_sum": 6,
        "vllm:request_prompt_tokens_sum": 5, "vllm:request_generation_tokens_sum": 4,
        "vllm:request_max_num_generation_tokens_sum": 3 + 0, "vllm:request_max_num_generation_tokens_count": 2,
        "vllm:request_params_max_tokens_sum": 6, "vllm:request_params_n_sum": 3,
        "vllm:request_success_total/stop": 1, "vllm:request_success_total/length": 1,
        "vllm:request_success_total/abort": 1, "vllm:request_success_total/error": 0,
        "vllm:gpu_cache_usage_perc": 0.25, "llamacpp:kv_cache_usage_ratio": 0.25, "llamacpp:requests_processing": 1,
        "vllm:spec_decode_num_drafts_total": 3, "llamacpp:spec_decode_num_drafts_total": 3,
        "llamacpp:prompt_tokens_total": 3, "llamacpp:prompt_seconds_total": 2 + 8,
        "llamacpp:prompt_tokens_seconds": 0.3,
        "llamacpp:tokens_predicted_seconds_total": 6, "llamacpp:predicted_tokens_seconds": 4 / 6,
        "llamacpp:n_busy_slots_per_decode": 1.5, "llamacpp:n_tokens_max": 5, "llamacpp:n_decode_total": 4,
    }.items():  # fmt: skip
        assert found[name] == pytest.approx(wanted), name
