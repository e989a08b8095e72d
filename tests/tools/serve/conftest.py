"""Servers of tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import Served, started
from support.tiny import CHAT, write_model

#: CHAT that tells of tools, and of calls of earlier turns.
TOOLS = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}" + CHAT.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
)
#: Tokens that stand around a text to be filled in.
FIM = {f"fim_{role}_token_id": 4 + i for i, role in enumerate(("pre", "suf", "mid", "rep", "sep"))}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4,096 tokens, so that a text takes a while."""
    path = tmp_path_factory.mktemp("serve") / "tiny.gguf"
    return write_model(path, "llama", tokenizer="spm", chat=TOOLS, context_length=4096, vocab=FIM)


@pytest.fixture(scope="session")
def served(tiny: Path) -> Iterator[Served]:
    """It serves whoever asks."""
    server = started(
        str(tiny), "--temp", "0", "-np", "6", "--max-total-tokens", "8192", "--pooling", "mean", "--max-body", "131072"
    )
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def guarded(tiny: Path, tmp_path: Path) -> Iterator[Served]:
    """It asks for keys, makes one text at once, lets two wait, and has a template of its own."""
    keys = tmp_path / "keys"
    keys.write_text("second\nthird\n")
    template = tmp_path / "own.jinja"
    template.write_text("Listen. {{ tone }}" + TOOLS)
    server = started(
        str(tiny), "--api-key", "first", "--api-key-file", str(keys), "-np", "1", "--max-queue", "2", "--timeout", "1",
        "--max-body", "4096", "--alias", "mine, ours", "--log-json",
        "--chat-template-file", str(template), "--chat-template-kwargs", '{"tone": "[soft]"}',
    )  # fmt: skip
    yield server
    server.process.kill()
    server.process.wait()
