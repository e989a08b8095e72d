"""A rank that dies or hangs while a model is loaded, in the middle of a prompt or of a step: the others end in time and
its error is said once."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

import pytest
from support.rank_faults import LOOKS, work
from support.tiny import write_model

from graphrt.errors import RankError
from graphrt.tools.ranks.launch import Job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "m.gguf", "llama", tokenizer="spm")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stopped sum 20", f"rank 1 of 2: it has given no sign of life for {LOOKS} s"),
        ("ended load 5", "rank 1 of 2: it was ended by SIGKILL"),
        ("ended sum 3", "rank 1 of 2: it was ended by SIGKILL"),
        ("loops sum 20", f"rank 1 of 2: it runs, but for {LOOKS} s has not come to where the other ranks wait"),
        ("stopped load 5", f"rank 1 of 2: it has given no sign of life for {LOOKS} s"),
        ("loops take 9", f"rank 1 of 2: it runs, but for {LOOKS} s has not come to where the other ranks wait"),
    ],
)
def test_the_others_end(model: Path, fault: str, said: str) -> None:
    pp = 2 if "take" in fault else 1
    args = argparse.Namespace(model=str(model), backend="cpu", threads=1, json=True, pp=pp)
    with pytest.raises(RankError) as error:
        Job(args, 2, work, fault).run()
    assert str(error.value).startswith(said)
    assert not multiprocessing.active_children()
