"""What /metrics tells, in Prometheus' form. Names are vLLM's, and llama-server's, after our own prefix."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from graphrt.tools.serve.scheduler import Event, Scheduler

disable_created_metrics()  # type: ignore[no-untyped-call]  # a line more for each figure, which says when this process began
_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """Figures since the server's start. tell() is called by the worker's thread, text() by any."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"graphrt:{name}", what, labels, registry=self.registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"graphrt:{name}", what, registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"graphrt:{name}", what, registry=self.registry, buckets=_SECONDS)

        self.http = counter("http_requests", "requests by path and status", ("path", "status"))
        self._prompt = counter("prompt_tokens", "tokens of prompts, those from the cache included")
        self._cached = counter("prefix_cache_hits", "tokens of prompts that the cache had already")
        self._made = counter("generation_tokens", "tokens generated")
        self._preempted = counter("num_preemptions", "texts that gave their pages back and began anew")
        self._guessed = counter("spec_decode_num_draft_tokens", "tokens that were guessed and read with others")
        self._right = counter("spec_decode_num_accepted_tokens", "those of them that were the texts' own")
        self._ended = counter("request_success", "texts that ended, by why", ("finished_reason",))
        self._running = gauge("num_requests_running", "texts that are read or generated")
        self._waiting = gauge("num_requests_waiting", "texts that wait for their turn")
        self._usage = gauge("kv_cache_usage_perc", "share of the cache's pages in use by texts; 1 is all")
        self._first = histogram("time_to_first_token_seconds", "from a text's arrival to its first token")
        self._between = histogram("inter_token_latency_seconds", "between two tokens of a text")
        self._whole = histogram("e2e_request_latency_seconds", "from a text's arrival to its end")
        self._lock = threading.Lock()
        self._latest: dict[int, float] = {}
        self._told: dict[Counter, int] = {}

    def tell(self, events: Sequence[Event]) -> None:
        """What has become of texts just now."""
        now = time.monotonic()
        with self._lock:
            for text, piece, error in events:
                ended = piece is None or bool(piece.finish)
                if piece is not None:
                    before = self._latest.get(id(text))
                    histogram = self._first if before is None else self._between
                    histogram.observe(now - (text.came if before is None else before))
                    self._latest[id(text)] = now
                if ended:
                    self._latest.pop(id(text), None)
                    self._whole.observe(now - text.came)
                    self._ended.labels(type(error).__name__.lower() if error else piece.finish if piece else "").inc()

    def text(self, scheduler: Scheduler | None) -> bytes:
        """In the text form of Prometheus."""
        with self._lock:
            if scheduler is not None:
                counts, (used, all_pages) = scheduler.counts, scheduler.pages
                for counter, value in (
                    (self._prompt, counts.prompt_tokens),
                    (self._cached, counts.cached_tokens),
                    (self._made, counts.made_tokens),
                    (self._preempted, counts.preemptions),
                    (self._guessed, counts.guessed_tokens),
                    (self._right, counts.right_tokens),
                ):
                    counter.inc(value - self._told.get(counter, 0))
                    self._told[counter] = value
                self._running.set(len(scheduler.running))
                self._waiting.set(len(scheduler.waiting))
                self._usage.set(used / all_pages)
            return generate_latest(self.registry)
