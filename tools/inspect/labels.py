"""How tools spell what is known of a tensor: the same words in tables, pictures and pages."""

from __future__ import annotations

from dataclasses import MISSING, fields

from graphrt.dtypes import dtype
from graphrt.op import op_spec
from graphrt.tensor import contiguous_nb
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo


def n_dims(t: TensorInfo) -> int:
    """Dimensions up to the last one over 1, at least 1."""
    return max((i + 1 for i, n in enumerate(t.ne) if n > 1), default=1)


def type_text(t: TensorInfo) -> str:
    """`f32[576, 9]`, as Tensor.describe() has it."""
    return f"{t.dtype}[{', '.join(map(str, t.ne[: n_dims(t)]))}]"


def nb_text(t: TensorInfo) -> str:
    """The strides of the dimensions that are shown, in bytes; in brackets when they are those of rows without gaps."""
    shown = ", ".join(map(str, t.nb[: n_dims(t)]))
    return f"({shown})" if t.nb == contiguous_nb(dtype(t.dtype), t.ne) else shown


def role(info: GraphInfo, t: TensorInfo) -> str:
    """The op; of a leaf what it is: input, weight, state (a cache), or just leaf where nothing tells."""
    if not t.is_leaf:
        return t.op
    if "input" in t.flags:
        return "input"
    usage = info.buffers[t.place.buffer].usage if t.place is not None else ""
    return {"weights": "weight", "state": "state"}.get(usage, "leaf")


def params_text(t: TensorInfo) -> str:
    """`n_dims=64 freq_base=100000.0`: the parameters that are not what the op takes without being told."""
    cls = op_spec(t.op).params if t.params else None
    if cls is None or t.params is None:
        return ""
    usual = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    told = {name: value for name, value in t.params.items() if name not in usual or value != usual[name]}
    return " ".join(f"{name}={_value(value)}" for name, value in told.items())


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def source_text(info: GraphInfo, t: TensorInfo) -> str:
    """The sources by name, - for an absent one; absent ones at the end are left out."""
    names = [info.tensors[s].name if s is not None else "-" for s in t.src]
    while names and names[-1] == "-":
        names.pop()
    return ", ".join(names)


def view_text(info: GraphInfo, t: TensorInfo) -> str:
    """`of cache_k_l0 +128`: whose memory it looks at, and from which byte."""
    if t.view is None:
        return ""
    return f"of {info.tensors[t.view.of].name}" + (f" +{t.view.offset}" if t.view.offset else "")


def group_text(info: GraphInfo, t: TensorInfo) -> str:
    """`12 norm_mul`: the number of its group, and its name where nodes are fused."""
    if t.group is None:
        return ""
    group = info.groups[t.group]
    return f"{t.group} {group.name}" if len(group.members) > 1 else str(t.group)


def place_text(info: GraphInfo, t: TensorInfo) -> str:
    """`compute 121 +18944`: the buffer's use and number, and the offset in bytes; "fused away" for none."""
    if t.place is None:
        return "fused away" if t.group is not None else ""
    return f"{info.buffers[t.place.buffer].usage} {t.place.buffer} +{t.place.offset}"


def si(n: float) -> str:
    """1536000 -> "1.5 M"."""
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000 or unit == "T":
            return f"{n:.0f}" if not unit else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def flop_text(n: float) -> str:
    """1536000 -> "1.5 MFLOP"."""
    text = si(n)
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def heading(info: GraphInfo) -> str:
    """`smol.gguf, decode of 1 token`."""
    if info.phase == "graph":
        return info.title
    return f"{info.title}, {info.phase} of {info.n_tokens} token{'s' * (info.n_tokens > 1)}"
