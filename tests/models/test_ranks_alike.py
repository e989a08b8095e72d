"""What ranks compare before the first step: stages, options, vocabularies, adapters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.adapters import write_adapter
from support.tiny import write_model

from graphrt.backend import get_backend
from graphrt.env import FUSE
from graphrt.errors import RankError
from graphrt.models import load
from graphrt.models.adapters import AdapterFile, read_adapter
from graphrt.models.arch import read_file
from graphrt.models.gguf import GGUFFile
from graphrt.models.ranks.adapters import check_adapters
from graphrt.models.ranks.network import check_alike
from graphrt.ranks import Ranks, join
from graphrt.tools.ranks.member import _check_options, _options


class Recorded(Ranks):
    """A rank that notes what it says in `group`, and hears what is there already from the others."""

    def everyones(self, value: Any) -> list[Any]:
        self.group.append(value)
        return list(self.group)


def test_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: None)
    monkeypatch.setattr(Ranks, "everyones", lambda ranks, value: [value, 1])
    with pytest.raises(RankError, match=r"into as many stages, got \[2, 1\], rank by rank; give all one --pp"):
        join(0, 2, "nowhere", stages=2)


def test_options() -> None:
    """What is of a rank's own host may differ."""
    mine = argparse.Namespace(model="a.gguf", threads=4, ctx_size=64, temp=0.5, on_ready=print, file=None)
    same = argparse.Namespace(**vars(mine) | {"model": "/else/a.gguf", "threads": 2, "on_ready": None, "file": "x"})
    del same.on_ready
    _check_options([_options(mine), _options(same)])
    for changed in ({"ctx_size": 128}, {"temp": 0.50001}, {"more": 1}):
        other = argparse.Namespace(**vars(mine) | changed)
        for pair in ((mine, other), (other, mine)):
            with pytest.raises(
                RankError, match=rf"the same options, {next(iter(changed))} is .* on rank 0 and .* rank 1"
            ):
                _check_options([_options(each) for each in pair])


def test_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, which --fuse sets: ranks would meet in other calls."""
    mine = _options(argparse.Namespace())
    monkeypatch.setenv(FUSE.name, FUSE.default)
    _check_options([mine, _options(argparse.Namespace())])
    monkeypatch.setenv(FUSE.name, "0")
    with pytest.raises(RankError, match="same options, --fuse is all on rank 0 and 0 on rank 1"):
        _check_options([mine, _options(argparse.Namespace())])


def test_vocabularies(tmp_path: Path) -> None:
    """Files of the same weights, one of which ends texts with another token."""
    paths = [
        write_model(tmp_path / f"{eos}.gguf", "llama", tokenizer="spm", vocab={"eos_token_id": eos}) for eos in (2, 3)
    ]
    said: list[Any] = []
    for path, fits in ((paths[0], True), (paths[0], True), (paths[1], False)):
        with GGUFFile.open(path) as file:
            given = Recorded(len(said), 3, said), read_file(file), file, get_backend("cpu")
            if fits:
                check_alike(*given)
                continue
            with pytest.raises(RankError, match="must have one file, their vocabularies differ: rank 0 has .* rank 2 "):
                check_alike(*given)


def test_adapters(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True)

    def read(name: str, target: str) -> AdapterFile:
        write_adapter(tmp_path / name, model, targets=(target,))
        return read_adapter(tmp_path / name, "a", "llama", model.weights)

    one, other = read("a.gguf", "attn_q"), read("b.gguf", "attn_k")
    said: list[Any] = []
    check_adapters(Recorded(0, 2, said), [one], [1.0])
    check_adapters(Recorded(1, 2, said), [one], [1])
    for files, scales in (([other], [1.0]), ([one], [0.5]), ([one, one], [1.0])):
        with pytest.raises(RankError, match="all ranks must have the same adapters, rank 0 has .* rank 1"):
            check_adapters(Recorded(1, 2, said[:1]), files, scales)
