"""--prompt-cache: what prompts began with outlives a server that ends; what can't be read costs nothing but a line."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx2
import pytest
from support.served import started

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.kept_prompts import BETWEEN, QUIET, KeptPrompts
from graphrt.tools.verbs import serve

PROMPT = [5 + i % 50 for i in range(200)]


def cached(url: str) -> tuple[str, int]:
    """A text after the prompt, and how many of the prompt's tokens were not read."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_when_prompts_are_written(tiny: Path, tmp_path: Path) -> None:
    """Once nothing was asked for a while, of what is new, and not all the time."""
    args = verb_parser("serve", serve).parse_args([str(tiny), "-np", "2", "-c", "512"])
    scheduler, now, path = serve.scheduler_of(load(tiny, "cpu"), args), 100.0, tmp_path / "kept"
    assert scheduler is not None
    kept = KeptPrompts(scheduler, path, 1 << 30, lambda: now)
    assert kept.due() is None, "nothing was read"
    scheduler.engine.read({0: PROMPT})
    scheduler.counts.steps = 1
    assert kept.due() == QUIET
    now += QUIET - 0.5
    scheduler.counts.steps = 2
    assert kept.due() == QUIET
    now += QUIET
    assert kept.due() == 0
    kept.write(lambda: True)
    assert list(tmp_path.iterdir()) == [] and kept.due() == QUIET, "somebody asked meanwhile"
    kept.write(lambda: False)
    assert path.stat().st_size > 1000 and kept.due() is None
    scheduler.counts.steps = 3
    assert kept.due() == BETWEEN
    now += BETWEEN
    assert kept.due() == 0


def test_servers_one_after_the_other(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    flags = [str(tiny), "-np", "2", "-c", "512", "--prompt-cache", str(kept)]
    first = started(*flags)
    text, n = cached(first.url)
    end = time.monotonic() + 60
    while not kept.exists():
        assert time.monotonic() < end, "it is written while nothing is asked"
        time.sleep(0.05)
    first.process.kill()
    first.process.wait(60)
    assert n == 0 and list(tmp_path.iterdir()) == [kept] and kept.stat().st_mode & 0o77 == 0
    written = kept.stat().st_ino
    second = started(*flags)
    assert cached(second.url) == (text, 192), "three pages of 64"
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(60) == 0
    assert kept.stat().st_ino != written and list(tmp_path.iterdir()) == [kept], "it is written at the end too"
    data = kept.read_bytes()
    args = verb_parser("serve", serve).parse_args(flags)
    state = serve.made_state(load(tiny, "cpu"), args, SamplerParams())
    kept.write_bytes(data[:-1])
    with caplog.at_level("INFO"), serve.kept_prompts(state.worker.scheduler, None, args):
        assert "cut short" in caplog.text and state.worker.scheduler is not None
    assert "0 tokens of prompts are kept" in caplog.text and len(kept.read_bytes()) < len(data)
    args.prompt_cache = str(tmp_path / "no" / "folder")
    with serve.kept_prompts(state.worker.scheduler, None, args):
        pass
    assert "must be writable" in caplog.text
