"""From a model's step to a launch: the calls that docs/debugging.md names are those that are made."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
from support import ROOT
from support.tiny import write_model

pytest.importorskip("triton")

from graphrt.backends.triton import device
from graphrt.backends.triton.launch import Launch
from graphrt.models import load
from graphrt.models.engine import SessionOptions


@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
def test_the_calls_that_the_page_names_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)`(.*?)\| `([\w/]+\.py)` \|$", page, re.MULTILINE)
    named = [
        (name.rpartition(".")[2], file) for first, more, file in rows for name in (first, *re.findall("`(\\w+)`", more))
    ]
    assert named[0] == ("eval", "models/session.py") and named[-1][1] == "backends/triton/launch.py"
    stacks: list[list[tuple[str, str]]] = []
    run = Launch.__call__

    def called(self: Launch) -> None:
        if self.name == "flash_attn":
            stacks.append([(f.name, f.filename.replace("\\", "/")) for f in traceback.extract_stack()])
        run(self)

    monkeypatch.setattr(Launch, "__call__", called)
    model = load(write_model(tmp_path / "m.gguf", "llama"), "triton")
    model.session(SessionOptions(n_ctx=64)).eval([3, 5, 7])
    left = iter(stacks[0])
    made = [(name, file) for name, file in named if file != "backends/triton/launch.py" and name != "in_order"]
    for name, file in made:
        assert any(name == called_name and at.endswith(file) for called_name, at in left), (name, file, stacks[0])


def test_the_breakpoint_is_where_the_document_says() -> None:
    """The line of forward.py that the chapter on stepping stops at is the one that it shows."""
    text = (ROOT / "docs/debugging.md").read_text()
    (asked,) = re.findall(r"^\(Pdb\) b graphrt/(\S+):(\d+)$", text, re.M)
    (told,) = re.findall(r"^> graphrt/(\S+)\((\d+)\)flash_attn\(\)\n-> (.*)$", text, re.M)
    assert asked == told[:2]
    assert (ROOT / told[0]).read_text().splitlines()[int(told[1]) - 1].strip() == told[2]
