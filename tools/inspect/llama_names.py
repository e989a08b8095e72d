"""What llama.cpp calls the nodes of a model's graph where graphrt, whose names are used once, has another name."""

from __future__ import annotations

import re

from graphrt.tensor import Tensor

#: A name here, and there. {kind}: of a GLU.
_OTHER = (
    (re.compile(r"inp_embd"), "embd"),
    (re.compile(r"([QK]cur)_rope(-\d+)"), r"\1\2"),
    (re.compile(r"([qk]_pe)_rope(-\d+)"), r"\1\2"),
    (re.compile(r"q_a(?:_normed)?(-\d+)"), r"q\1"),
    (re.compile(r"kv_cmpr_normed(-\d+)"), r"kv_cmpr\1"),
    (re.compile(r"norm_ffn_post_norm-\d+"), "norm"),
    (re.compile(r"norm_w_\w+(-\d+)"), r"norm_w\1"),
    (re.compile(r"norm_\w+(-\d+)"), r"norm\1"),
    (re.compile(r"inp_sum"), "inp_embd"),
    (re.compile(r"inp_norm"), "inp_norm-0"),
    (re.compile(r"ffn_glu(-\d+)"), r"ffn_{kind}\1"),
    (re.compile(r"(cache_[kv]_l\d+) \(set\)"), r"\1 (view)"),
)
#: What a node without a name is called after the one that it looks at.
_VIEWS = {"RESHAPE": "", "VIEW": " (view)", "PERMUTE": " (permuted)", "TRANSPOSE": " (transposed)"}
_NO_NAME = re.compile(r"node_\d+")


def llama_name(t: Tensor) -> str:
    """The name that llama.cpp gives to a node or leaf."""
    if t.op in _VIEWS and _NO_NAME.fullmatch(t.name):
        return llama_name(next(t.sources())).removesuffix(_VIEWS[t.op]) + _VIEWS[t.op]
    for here, there in _OTHER:
        match = here.fullmatch(t.name)
        if match:
            return match.expand(there).replace("{kind}", str(getattr(t.params, "kind", "")))
    return t.name
