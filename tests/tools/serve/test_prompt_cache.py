"""--prompt-cache: what prompts began with outlives a server that ends; what can't be read costs nothing but a line."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import pytest
from support.served import started

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.verbs import serve

PROMPT = [5 + i % 50 for i in range(200)]


def cached(url: str) -> tuple[str, int]:
    """A text after the prompt, and how many of the prompt's tokens were not read."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_servers_one_after_the_other(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    flags = [str(tiny), "-np", "2", "-c", "512", "--prompt-cache", str(kept)]
    first = started(*flags)
    text, n = cached(first.url)
    first.process.send_signal(signal.SIGTERM)
    assert n == 0 and first.process.wait(60) == 0
    data = kept.read_bytes()
    assert kept.stat().st_mode & 0o77 == 0
    second = started(*flags)
    assert cached(second.url) == (text, 192), "three pages of 64"
    second.process.kill()
    second.process.wait(60)
    assert kept.read_bytes() == data and list(tmp_path.iterdir()) == [kept]
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
