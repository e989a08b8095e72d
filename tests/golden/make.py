"""Regenerates tests/golden/*.npz with llama.cpp, by hand: `pip install llama-cpp-python; python tests/golden/make.py`.

Each file has llama.cpp's logits for the 40 tokens of tests/support/tiny.py on a tiny f32 model, with an f32 cache and
without flash attention: the first 32 tokens in one batch, the rest one by one.
"""

import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.tiny import MODELS, tokens, write_model  # noqa: E402


def decode(ctx: object, ids: list[int], past: int) -> np.ndarray:
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, past + i, 1, True
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(ctx, batch) == 0
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, i), shape=(128,)).copy() for i in range(len(ids))]
    llama_cpp.llama_batch_free(batch)
    return np.stack(rows)


def main() -> None:
    llama_cpp.llama_backend_init()
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder) / f"{name}.gguf", name)
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_threads = 256, 64, 2
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = 0  # off
            ctx = llama_cpp.llama_init_from_model(model, params)
            ids = tokens()
            rows = [decode(ctx, ids[:32], 0)] + [decode(ctx, [t], 32 + i) for i, t in enumerate(ids[32:])]
            np.savez_compressed(HERE / f"{name}.npz", tokens=np.array(ids), logits=np.concatenate(rows))


if __name__ == "__main__":
    main()
