"""Measures the tiny models of every architecture against llama.cpp's golden figures, and writes docs/models.md's table.

    python tests/support/arch_table.py            what the table would be
    python tests/support/arch_table.py --write    measure, write tests/golden/architectures.json, docs/models.md
    python tests/support/arch_table.py --write --figures    without measuring: features anew, the kept figures

A model of a new architecture belongs in tiny.py or tiny_archs.py; its features are read off its graph.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("TRITON_INTERPRET", "1")

from graphrt import get_backend  # noqa: E402
from graphrt.models import Model, load  # noqa: E402
from graphrt.models.arch import ARCHITECTURES  # noqa: E402
from graphrt.models.arch.experts import MixtureDecoder  # noqa: E402
from graphrt.models.arch.layout import Experts  # noqa: E402
from graphrt.models.arch.skeleton import Decoder  # noqa: E402
from graphrt.models.engine import SessionOptions  # noqa: E402
from graphrt.testing import nmse  # noqa: E402
from support.tiny import tokens, write_model  # noqa: E402
from support.tiny_archs import DECODERS, ENCODERS, TEXTS  # noqa: E402

PAGE = HERE.parent / "docs" / "models.md"
FIGURES = HERE / "golden" / "architectures.json"
BEGIN, END = "<!-- made by tests/support/arch_table.py -->", "<!-- end of what is made -->"
COLUMNS = ("architecture", "features", "CPU", "GPU")
FIRST = ("llama", "gemma3")  # those of tiny.py, which other tests add to
NAMES = (*FIRST, *DECODERS, *ENCODERS)


def architecture_of(name: str) -> str:
    """The architecture of a tiny model."""
    return {**DECODERS, **ENCODERS}[name].arch if name in {**DECODERS, **ENCODERS} else name


def golden(name: str) -> np.ndarray:
    """llama.cpp's logits, or an encoder's embeddings with the pooling "mean"."""
    if name in FIRST:
        found: np.ndarray = np.load(HERE / "golden" / f"{name}.npz")["logits"]
        return found
    both = np.load(HERE / "golden" / "archs.npz")
    return both[f"{name} mean" if name in ENCODERS else name]


def measured(name: str, path: Path, backend: str) -> float:
    """The NMSE of a tiny model on a backend's fast form: of a prompt and a few tokens after it, f32 cache."""
    model = load(path, [get_backend(backend, exact=False)])
    wanted = golden(name)
    if name in ENCODERS:
        return nmse(np.stack(model.embed(TEXTS, "mean", normalize=False)), wanted)
    session = model.session(SessionOptions(type_k="f32", type_v="f32"))
    n, ids = 32 if backend == "cpu" else 14, tokens()  # the interpreter is slow; windows are of 12
    rows = [session.eval(ids[:n])[None].copy(), session.eval([ids[n]])[None].copy()]
    return nmse(np.concatenate(rows), wanted[n - 1 : n + 1])


def features(model: Model) -> Iterator[str]:
    """What a model's graph exercises, in the order of a table's cell."""
    network, hp, layer = model.network, model.network.hp, model.network.layers[0]
    attention, rope = layer.attention, hp.rope
    factors = rope is not None and network.rope_factors(hp.n_ctx_train) is not None
    decodes = isinstance(network, Decoder)
    glu = {"silu": "SwiGLU", "gelu": "GeGLU"}[network.activation]
    shape = {"gated": glu, "fused": f"{glu} of one matrix", "plain": network.activation.upper()}
    mixtures = [x.feed_forward for x in network.layers if isinstance(x.feed_forward, Experts)]
    mixture = mixtures[0] if mixtures else None
    limited = isinstance(network, MixtureDecoder) and type(network).expert_glu is not MixtureDecoder.expert_glu
    found = {
        "encoder": not decodes,
        f"RoPE ({rope.mode if rope else ''})": rope is not None,
        "of a part of each head": rope is not None and rope.n_dims < hp.d_k,
        "YaRN": rope is not None and rope.ext_factor != 0,
        "linear scaling": rope is not None and rope.freq_scale != 1 and not rope.ext_factor,
        "frequency factors": factors,
        "learned positions": network.position_embd is not None,
        "ALiBi": hp.max_alibi_bias > 0,
        "grouped heads": hp.n_head_kv[0] < hp.n_head[0] and hp.latent is None,
        "sliding windows": any(hp.windowed),
        "soft caps": hp.attn_softcap > 0,
        "sinks": "attn_sinks" in layer.extra,
        "latent attention": hp.latent is not None,
        "layer norm": network.traits.norm == "layer",
        "norms of q and k": "attn_q_norm" in layer.extra,
        "norms after": layer.attn_norm is None,
        "norms before and after": layer.attn_norm is not None and "post_attention_norm" in layer.extra,
        "q, k, v of one matrix": attention is not None and len(attention.qkv) == 1,
        "biases": attention is not None and attention.qkv[0].bias is not None,
        "limits on q, k, v": hp.clamp_kqv > 0,
        "parallel feed-forward": decodes and network.parallel and layer.ffn_norm is None,
        shape[network.layout.feed_forward]: not limited,
        "SwiGLU with limits": limited,
        f"experts ({hp.experts.gating if hp.experts else ''})": hp.experts is not None,
        "experts with biases": mixture is not None and mixture.up.bias is not None,
        "groups of experts": hp.experts is not None and hp.experts.groups > 1,
        "a bias for the choice": mixture is not None and mixture.choice_bias is not None,
        "shared experts": mixture is not None and mixture.shared is not None,
        "scaled logits": hp.logit_scale != 0,
    }
    return (name for name, there in found.items() if there)


def figures(kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """By architecture: its features, all that its models have; the worst NMSE on each backend, or those of `kept`."""
    none = {"cpu": 0.0, "triton": 0.0}
    table = {arch: {**none, **(kept or {}).get(arch, {}), "features": []} for arch in ARCHITECTURES}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = write_model(Path(folder) / f"{name}.gguf", name)
            row = table[architecture_of(name)]
            row["features"] += [f for f in features(load(path, "cpu")) if f not in row["features"]]
            if kept is not None:
                continue
            deep = name in DECODERS and DECODERS[name].layers > 10
            for backend in ("cpu",) if deep else ("cpu", "triton"):
                row[backend] = max(row[backend], float(f"{measured(name, path, backend):.0e}"))
            print(name, row["cpu"], row["triton"], file=sys.stderr, flush=True)
    return table


def markdown(table: dict[str, Any]) -> str:
    """The table: NMSE against llama.cpp, the worst of an architecture's models."""
    rows = [
        (f"`{arch}`", ", ".join(row["features"]), f"{row['cpu']:.0e}", f"{row['triton']:.0e}")
        for arch, row in table.items()
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    return "\n".join(lines)


def with_table(readme: str, table: dict[str, Any]) -> str:
    """The page's text with the table between its marks."""
    head, _, rest = readme.partition(BEGIN)
    return f"{head}{BEGIN}\n{markdown(table)}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> None:
    table = figures(json.loads(FIGURES.read_text()) if "--figures" in argv else None)
    if "--write" not in argv:
        print(markdown(table))
        return
    FIGURES.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), table))


if __name__ == "__main__":
    main(sys.argv[1:])
