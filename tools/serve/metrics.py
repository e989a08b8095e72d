"""What /metrics tells, in Prometheus' form. Names are vLLM's after our own prefix; metric_names.py tells the same
under those of vLLM and llama-server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from graphrt.models.step_times import StepTime
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.metric_names import OtherNames
from graphrt.tools.serve.scheduler import Scheduler
from graphrt.tools.serve.tally import ANSWERS, CHOICES, LENGTHS, STEPS, TOKENS, WAITS, Tally

disable_created_metrics()  # type: ignore[no-untyped-call]  # a line more for each figure, which says when this process began


class Metrics:
    """Figures since the server's start. model: its name. tell(), steps(), turn() are called by the worker's thread,
    text() by any. writes, late: what it takes to hand a socket pieces, and until the event loop has a step's tokens;
    both are the event loop's."""

    def __init__(self, model: str = "") -> None:
        self.registry = CollectorRegistry()
        self._others = CollectorRegistry()
        self._others.register(OtherNames(self.registry, model))

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"graphrt:{name}", what, labels, registry=self.registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"graphrt:{name}", what, registry=self.registry)

        def tally(name: str, what: str, edges: Sequence[float] = ANSWERS) -> Tally:
            made = Tally(f"graphrt:{name}", what, edges)
            self.registry.register(made)
            return made

        self.http = counter("http_requests", "requests by path and status", ("path", "status"))
        self._prompt = counter("prompt_tokens", "tokens of prompts, those from the cache included")
        self._looked_up = counter("prefix_cache_queries", "tokens of prompts that the cache was searched for")
        self._cached = counter("prefix_cache_hits", "tokens of prompts that the cache had already")
        self._made = counter("generation_tokens", "tokens generated")
        self._preempted = counter("num_preemptions", "texts that gave their pages back and began anew")
        self._steps = counter("steps", "turns in which the model read something")
        self._busy = counter("step_texts", "texts that were read or generated, of all these turns together")
        self._guesses = counter("spec_decode_num_drafts", "guesses of one or more tokens")
        self._guessed = counter("spec_decode_num_draft_tokens", "tokens that were guessed and read with others")
        self._right = counter("spec_decode_num_accepted_tokens", "those of them that were the texts' own")
        self._ended = counter("request_success", "texts that ended, by why", ("finished_reason",))
        self._running = gauge("num_requests_running", "texts that are read or generated")
        self._waiting = gauge("num_requests_waiting", "texts that wait for their turn")
        self._usage = gauge("kv_cache_usage_perc", "share of the cache's pages in use by texts; 1 is all")
        self._longest = gauge("longest_text_tokens", "tokens of the longest text that has ended, with its prompt")
        self._first = tally("time_to_first_token_seconds", "from a text's arrival to its first token")
        self._between = tally("inter_token_latency_seconds", "between two tokens of a text")
        self._whole = tally("e2e_request_latency_seconds", "from a text's arrival to its end")
        self._queue = tally("request_queue_time_seconds", "from a text's arrival until its prompt is begun", WAITS)
        self._prefill = tally("request_prefill_time_seconds", "from then to its first token", WAITS)
        self._decode = tally("request_decode_time_seconds", "from a text's first token to its last", WAITS)
        self._inference = tally("request_inference_time_seconds", "from a prompt's beginning to its text's end", WAITS)
        self._each = tally("request_time_per_output_token_seconds", "the mean of a text between two tokens", WAITS)
        self._lengths = tally("request_prompt_tokens", "tokens of a prompt", LENGTHS)
        self._made_each = tally("request_generation_tokens", "tokens that were generated of a text", LENGTHS)
        self._most_of = tally("request_max_num_generation_tokens", "of the longest text of a prompt", LENGTHS)
        self._asked = tally("request_params_max_tokens", "tokens that a text may have, where there is a limit", LENGTHS)
        self._choices = tally("request_params_n", "texts that are asked for of a prompt", CHOICES)
        self._device = tally("step_device_seconds", "a step of the model on its device", STEPS)
        self._host = tally("step_host_seconds", "a turn of the thread beside it, waiting left out", STEPS)
        self._waited = tally("step_wait_seconds", "that thread's waiting for the device, in a turn", STEPS)
        self._read = tally("iteration_tokens_total", "tokens that a step reads", TOKENS)
        self.late = tally("step_delivery_seconds", "from a step's tokens to the event loop's having them", STEPS)
        self.writes = tally("stream_write_seconds", "handing pieces of a streamed answer to a socket", STEPS)
        self._prepared = counter("steps_prepared", "sizes of steps that were made ready, those at the start included")
        self._lock = threading.Lock()
        self._latest: dict[int, float] = {}
        self._made_of: dict[int, list[int]] = {}  # tokens of the texts of a prompt that have ended, while others go on
        self._longest_text = 0
        self._told: dict[Counter, int] = {}

    def tell(self, events: Sequence[Event]) -> None:
        """What has become of texts just now."""
        now = time.monotonic()
        with self._lock:
            for text, piece, error in events:
                ended = piece is None or bool(piece.finish)
                if piece is not None:
                    before = self._latest.get(id(text))
                    if before is not None:
                        self._between.add(now - before)
                    else:
                        self._first.add(now - text.came)
                        self._queue.add(text.read - text.came)
                        self._prefill.add(now - text.read)
                    self._latest[id(text)] = now
                if ended:
                    self._latest.pop(id(text), None)
                    self._whole.add(now - text.came)
                    self._add_text(text)
                    self._ended.labels(type(error).__name__.lower() if error else piece.finish if piece else "").inc()

    def _add_text(self, text: Text) -> None:
        """One that has ended."""
        self._lengths.add(len(text.prompt))
        self._made_each.add(text.n_made)
        if text.most >= 0:
            self._asked.add(text.most)
        self._longest_text = max(self._longest_text, len(text.tokens))
        if text.n_made:
            self._decode.add(text.last - text.began)
            self._inference.add(text.last - text.read)
        if text.n_made > 1:
            self._each.add((text.last - text.began) / (text.n_made - 1))
        first = id(text.leader or text)
        made = self._made_of.setdefault(first, [])
        made.append(text.n_made)
        if len(made) == text.n_choices:
            del self._made_of[first]
            self._most_of.add(max(made))
            self._choices.add(text.n_choices)

    def steps(self, times: Sequence[StepTime]) -> None:
        """The steps whose tokens a turn of the worker's thread has had."""
        for each in times:
            self._device.add(each.device)
            self._read.add(each.n_tokens)
        if times:
            self._waited.add(sum(each.waited for each in times))

    def turn(self, times: Sequence[StepTime], seconds: float) -> None:
        """What such a turn took in all."""
        if times:
            self._host.add(max(0.0, seconds - sum(each.waited for each in times)))

    def text(self, scheduler: Scheduler | None) -> bytes:
        """In the text form of Prometheus."""
        with self._lock:
            if scheduler is not None:
                counts, (used, all_pages) = scheduler.counts, scheduler.pages
                for counter, value in (
                    (self._prompt, counts.prompt_tokens),
                    (self._looked_up, counts.looked_up_tokens),
                    (self._cached, counts.cached_tokens),
                    (self._steps, counts.steps),
                    (self._busy, counts.busy_texts),
                    (self._guesses, counts.guesses),
                    (self._made, counts.made_tokens),
                    (self._preempted, counts.preemptions),
                    (self._guessed, counts.guessed_tokens),
                    (self._right, counts.right_tokens),
                    (self._prepared, scheduler.engine.n_prepared),
                ):
                    counter.inc(value - self._told.get(counter, 0))
                    self._told[counter] = value
                self._running.set(len(scheduler.running))
                self._waiting.set(len(scheduler.waiting))
                self._usage.set(used / all_pages)
                self._longest.set(self._longest_text)
        return generate_latest(self.registry) + generate_latest(self._others)
