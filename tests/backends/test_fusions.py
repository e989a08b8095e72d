"""Which fusions a decode step of each architecture gets, on both backends: one that is lost, or new, shows here.

tests/golden/fusions.json has how many groups of each kernel a tiny model of the architecture has. Where a change is
meant: python tests/backends/test_fusions.py writes it anew.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from support import GOLDEN
from support.tiny import write_model
from support.tiny_archs import DECODERS

from graphrt import get_backend
from graphrt.backends.triton import device
from graphrt.models import load
from graphrt.models.engine import SessionOptions

FILE = GOLDEN / "fusions.json"
EXPECTED: dict[str, dict[str, dict[str, int]]] = json.loads(FILE.read_text())
#: Models of 26 and 64 layers, kept for what else they have; their layers are those of others.
LARGE = ("deepseek2-lite", "command-r-plus")


def fusions(path: Path, backend: str) -> dict[str, int]:
    """How many groups of several nodes a step of one token has, by the kernel that runs them."""
    model = load(path, get_backend(backend, exact=False))
    exe = model.engine(1, SessionOptions(n_ctx=64)).executable(1, 1)
    count = Counter(group.kernel for split in exe.splits for group in split.groups if group.kernel)
    return dict(sorted(count.items()))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in LARGE])
def test_a_decode_step_has_its_fusions(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "triton" and device.unusable() is not None:
        pytest.skip(f"the triton backend can't be used here: {device.unusable()}")
    assert fusions(write_model(tmp_path / "m.gguf", name), backend) == EXPECTED[name][backend]


def main() -> None:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in DECODERS if name not in LARGE):
            path = write_model(Path(folder) / f"{name}.gguf", name)
            lines.append(f"{json.dumps(name)}: {json.dumps({b: fusions(path, b) for b in ('triton', 'cpu')})}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
