"""Regenerates tests/golden/eval_callback.json with llama.cpp.

By hand: pip install llama-cpp-python, and python tests/golden/make_sums.py

For each tiny model (with tokenizer="spm") and the prompt of IDS: what llama-eval-callback is given of every node, as
[name, op, ne, sum of the values, sum of their magnitudes]; an f16 cache, flash attention.
"""

import ctypes as c
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.tiny import MODELS, write_model  # noqa: E402

#: "hello the sea, he"
IDS = [1, 327, 319, 261, 268, 262, 264, 295, 325]
TYPES = {0: np.float32, 1: np.float16, 26: np.int32, 27: np.int64}


class Tensor(c.Structure):
    """struct ggml_tensor of ggml 0.25."""

    _fields_ = (
        ("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4), ("op", c.c_int32),
        ("op_params", c.c_int32 * 16), ("flags", c.c_int32), ("src", c.c_void_p * 10), ("view_src", c.c_void_p),
        ("view_offs", c.c_size_t), ("data", c.c_void_p), ("name", c.c_char * 64),
    )  # fmt: skip


def sums(path: Path) -> list[list[object]]:
    base = c.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base*"))))
    base.ggml_op_desc.restype, base.ggml_op_desc.argtypes = c.c_char_p, [c.c_void_p]
    found: list[list[object]] = []

    @c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
    def seen(address: int, ask: bool, _: object) -> bool:
        t = Tensor.from_address(address)
        if not ask and t.type in TYPES:
            kind, ne, nb = np.dtype(TYPES[t.type]), list(t.ne), list(t.nb)
            n = sum((a - 1) * b for a, b in zip(ne, nb)) // kind.itemsize + 1
            raw = np.frombuffer((c.c_char * (n * kind.itemsize)).from_address(t.data), kind)
            values = np.lib.stride_tricks.as_strided(raw, ne[::-1], nb[::-1]).astype(float)
            names = t.name.decode(), base.ggml_op_desc(address).decode()
            found.append([*names, ne, float(values.sum()), float(np.abs(values).sum())])
        return True

    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch, params.flash_attn_type = 256, 1, 1, 1
    params.cb_eval = c.cast(seen, type(params.cb_eval))
    ctx = llama_cpp.llama_init_from_model(model, params)
    found.clear()
    ids = (llama_cpp.llama_token * len(IDS))(*IDS)  # the batch points at it
    assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(ids, len(IDS))) == 0
    return found


def main() -> None:
    llama_cpp.llama_backend_init()
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            golden[name] = sums(write_model(Path(folder) / f"{name}.gguf", name, tokenizer="spm"))
    rows = {name: ",\n".join(map(json.dumps, nodes)) for name, nodes in golden.items()}
    text = ",\n".join(f'"{name}": [\n{lines}\n]' for name, lines in rows.items())
    (HERE / "eval_callback.json").write_text("{" + text + "}\n")


if __name__ == "__main__":
    main()
