"""What the processes of tests/models/test_ranks.py run: ranks that are really several. And one that is alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphrt.errors import RankError
from graphrt.models import load
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model
from graphrt.ranks import ONE_SHOT, Ranks, join, leave
from support.tiny import tokens


class Alone(Ranks):
    """A rank that hears from the others what it says itself."""

    def everyones(self, value: Any) -> list[Any]:
        return [value] * self.size


F32 = SessionOptions(type_k="f32", type_v="f32")
#: Of a prompt, and of those that come one by one.
PROMPT, STEPS = 12, 3


def forms(path: Path) -> tuple[bool, ...]:
    """Whether a model runs exactly, and fast too: those with a vocabulary do."""
    return (True, False) if path.stem.endswith("words") else (True,)


#: Fewer tokens at once than a prompt has, so that it takes several steps.
FEW = replace(F32, n_batch=5)


def whole_experts(path: Path) -> bool:
    """Whether ranks have some of a model's experts whole."""
    return path.stem.endswith("ep")


def logits_of(model: Model) -> np.ndarray:
    """The prompt at once, then single tokens, then what follows a prompt that several steps read: f32 [PROMPT + STEPS +
    1, n_vocab]."""
    session, ids = model.session(F32), tokens()
    first = session.eval_rows(ids[:PROMPT])
    rows = [session.eval([t])[None].copy() for t in ids[PROMPT : PROMPT + STEPS]]
    several = model.session(FEW)
    last = several.eval(ids[:PROMPT])[None]
    assert ((FEW.n_batch, 1, "passing") in several._prepared) == (model.decoder.stages > 1)  # nobody waits for logits
    return np.concatenate([first, *rows, last])


def ragged(model: Model) -> np.ndarray:
    """What follows three texts of different lengths, over pages: f32 [3, n_vocab]."""
    engine, ids = model.engine(3, replace(FEW, n_ctx=64, page=16)), tokens()
    engine.read({0: ids[:PROMPT], 1: ids[3:5]})
    return engine.read({0: ids[5:6], 2: ids[:7], 1: ids[8:10]})


def generated(model: Model) -> list[int]:
    """Greedy tokens, which a step writes for the next one, and drawn ones by seeds that ranks don't share."""
    seed = 1 if model.ranks is None else 1 + model.ranks.rank
    drawn = model.generate(tokens()[:5], 6, seed=seed, temp=1.0, top_k=0, raw=True)
    greedy = model.generate(tokens()[:5], 6, temp=0.0)
    return [piece.token for piece in [*greedy, *drawn]]


def rank(number: int, size: int, folder: str, paths: list[str], stages: int = 1) -> None:
    """One rank of `size`, in so many stages: each model's logits and tokens, sums, and what it says of files that
    differ, into `folder`/`number`.npz."""
    torch.set_num_threads(1)
    ranks = join(number, size, folder, stages=stages)
    found: dict[str, np.ndarray] = {}
    for i, path in enumerate(paths):
        for exact in forms(Path(path)):
            model = load(path, "cpu", exact=exact, ranks=replace(ranks, ep=whole_experts(Path(path))))
            found[f"{i} {exact}"] = logits_of(model)
            if stages > 1:
                found[f"{i} {exact} ragged"] = ragged(model)
            if len(forms(Path(path))) > 1:
                found[f"{i} {exact} tokens"] = np.array(generated(model))
        found[f"{i} weights"] = np.array([t.nbytes for t in model.weights.loaded.values()])
    found |= _sums(ranks)
    if len(paths) > 1:
        found["refused"] = np.array(_refused(paths[0 if number else 1], ranks))
    np.savez(Path(folder, f"{number}.npz"), **found)
    ranks.told(None)
    leave()


def parts(n: int, size: int) -> list[torch.Tensor]:
    """What each rank adds: f32 [3, n]."""
    made = np.random.Generator(np.random.Philox(key=n)).standard_normal((size, 3, n), np.float32)
    return list(torch.from_numpy(made))


#: Elements of a row: in one shot, and in pieces that don't come out even.
WIDTHS = (5, ONE_SHOT // 4 + 1)


def _sums(ranks: Ranks) -> dict[str, np.ndarray]:
    return {f"sum {n}": ranks.summed(parts(n, ranks.size)[ranks.rank]).numpy() for n in WIDTHS}


def _refused(path: str, ranks: Ranks) -> str:
    try:
        load(path, "cpu", ranks=ranks)
    except RankError as error:
        return str(error)
    return ""
