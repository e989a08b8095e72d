"""Regenerates tests/golden/archs.npz with llama.cpp. By hand: pip install llama-cpp-python, and
python tests/golden/make_archs.py [NAME ...]      (with names only those, beside what there is)

Of each model of tests/support/tiny_archs.py, f32: a decoder's logits of 40 tokens, as make.py makes them; an encoder's
embeddings of TEXTS, for each pooling, read in one batch. Of QUANTIZED: the logits with weights of a type.
"""

import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from make import decode  # noqa: E402
from support.tiny import tokens, write_model  # noqa: E402
from support.tiny_archs import DECODERS, ENCODERS, QUANTIZED, TEXTS  # noqa: E402

POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3}


def context(path: Path, **changed: int) -> object:
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 256, 64, 64, 2
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = 0  # off
    for key, value in changed.items():
        setattr(params, key, value)
    return llama_cpp.llama_init_from_model(model, params)


def logits(path: Path) -> np.ndarray:
    ctx, ids = context(path), tokens()
    rows = [decode(ctx, ids[:32], 0)] + [decode(ctx, [t], 32 + i) for i, t in enumerate(ids[32:])]
    return np.concatenate(rows)


def embeddings(path: Path, pooling: str) -> np.ndarray:
    n_batch = 32 * len(TEXTS)  # as many of each, which llama.cpp counts on
    sizes = {"n_seq_max": len(TEXTS), "n_batch": n_batch, "n_ubatch": n_batch}
    ctx = context(path, embeddings=True, pooling_type=POOLINGS[pooling], **sizes)
    n = sum(map(len, TEXTS))
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    places = [(seq, i, t) for seq, ids in enumerate(TEXTS) for i, t in enumerate(ids)]
    for at, (seq, i, token) in enumerate(places):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, i, 1, True
        batch.seq_id[at][0] = seq
    assert llama_cpp.llama_encode(ctx, batch) == 0
    one = llama_cpp.llama_get_embeddings_ith if pooling == "none" else llama_cpp.llama_get_embeddings_seq
    rows = [
        np.ctypeslib.as_array(one(ctx, i), shape=(64,)).copy() for i in range(n if pooling == "none" else len(TEXTS))
    ]
    llama_cpp.llama_batch_free(batch)
    return np.stack(rows)


def main(names: list[str]) -> None:
    llama_cpp.llama_backend_init()
    target = HERE / "archs.npz"
    kept = dict(np.load(target)) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for name in names or [*DECODERS, *QUANTIZED, *ENCODERS]:
            write_model(path, *name.split())
            if name in ENCODERS:
                kept |= {f"{name} {pooling}": embeddings(path, pooling) for pooling in POOLINGS}
            else:
                kept[name] = logits(path)
    np.savez_compressed(target, **kept)


if __name__ == "__main__":
    main(sys.argv[1:])
