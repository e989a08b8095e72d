"""Gradients of what moves and computes rows, the losses and the optimizers' steps: the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from graphrt.backends.cpu.blocks import decode
from graphrt.backends.cpu.matmul import product, turn
from graphrt.backends.cpu.reference import reference
from graphrt.tensor import Tensor

# -- movement


@reference("REPEAT_BACK")
def repeat_back(node: Tensor, d: torch.Tensor) -> torch.Tensor:
    parts = [n for small, big in zip(node.shape, d.shape) for n in (big // small, small)]
    return d.reshape(parts).sum((0, 2, 4, 6))


@reference("GET_ROWS_BACK")
def get_rows_back(node: Tensor, d: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """d: [d3, d2, n_ids, n]; ids: [1, d3, d2, n_ids]."""
    out = torch.zeros(node.shape, dtype=d.dtype)
    i3, i2, i1 = ((ids[0] >= 0) & (ids[0] < node.ne[1])).nonzero(as_tuple=True)
    return out.index_put((i3, i2, ids[0, i3, i2, i1]), d[i3, i2, i1], accumulate=True)


@reference("SET_ROWS_BACK")
def set_rows_back(node: Tensor, d: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """d: [d3, d2, n_rows, n]; ids: [1, e3, e2, n_ids]."""
    d3, d2, n_rows = d.shape[:3]
    spread = ids[0].repeat(d3 // ids.shape[1], d2 // ids.shape[2], 1)
    outside = (spread < 0) | (spread >= n_rows)
    i3, i2 = torch.arange(d3)[:, None, None], torch.arange(d2)[None, :, None]
    return d[i3, i2, spread.masked_fill(outside, 0)].masked_fill(outside[..., None], 0.0)


def _places(shape: Sequence[int], nb: tuple[int, ...], offs: int, memory: torch.Tensor) -> torch.Tensor:
    """Where the elements of a tensor of these byte strides, of 4 bytes each, lie in memory."""
    return memory.as_strided(shape, tuple(n // 4 for n in nb[::-1]), offs // 4)


@reference("VIEW_BACK")
def view_back(node: Tensor, d: torch.Tensor) -> torch.Tensor:
    """As if the source lay in memory as its strides say: the view's places get what is theirs."""
    p = node.params
    size = 1 + sum((n - 1) * (step // 4) for n, step in zip(p.ne, p.nb))
    places = torch.arange(size)
    seen = _places(d.shape, (p.nb[0], *p.view_nb), p.offs, places)
    flat = torch.zeros(size, dtype=d.dtype).index_add(0, seen.reshape(-1), d.reshape(-1))
    return flat[_places(node.shape, p.nb, 0, places)]


# -- elements and rows


def _silu(a: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(a)
    return s * (1.0 + a * (1.0 - s))


def _gelu(a: torch.Tensor) -> torch.Tensor:
    bent = torch.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3))
    slope = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * a * a)
    return 0.5 * (1.0 + bent) + 0.5 * a * (1.0 - bent * bent) * slope


def _gelu_erf(a: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
    return 0.5 * torch.erfc(-a / math.sqrt(2.0)) + a * density


def _gelu_quick(a: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(1.702 * a)
    return s * (1.0 + 1.702 * a * (1.0 - s))


DERIVATIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "gelu_quick": _gelu_quick,
    "relu": lambda a: (a > 0).to(a.dtype),
    "tanh": lambda a: 4.0 * torch.sigmoid(2.0 * a) * torch.sigmoid(-2.0 * a),
    "sigmoid": lambda a: torch.sigmoid(a) * torch.sigmoid(-a),
    "exp": torch.exp,
    "softplus": torch.sigmoid,
}


@reference("SILU_BACK")
def silu_back(node: Tensor, d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return d * _silu(a)


@reference("UNARY_BACK")
def unary_back(node: Tensor, d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return d * DERIVATIVES[node.params.kind](a)


@reference("RMS_NORM_BACK")
def rms_norm_back(node: Tensor, d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    square = (a * a).mean(-1, keepdim=True) + node.params.eps
    along: torch.Tensor = (d * a).mean(-1, keepdim=True) / square
    return (d - a * along) / torch.sqrt(square)


@reference("ROPE_BACK")
def rope_back(
    node: Tensor, d: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None
) -> torch.Tensor:
    return turn(node.params, d, -positions, factors)


@reference("SOFT_MAX_BACK")
def soft_max_back(node: Tensor, d: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    factor: float = node.params.scale
    return factor * weights * (d - (d * weights).sum(-1, keepdim=True))


# -- products


@reference("OUT_PROD")
def out_prod(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a: [a3, a2, rows, m], b: [b3, b2, rows, p]; consecutive matrices of b share one of a."""
    for dim in (0, 1):
        if a.shape[dim] not in (1, b.shape[dim]):
            a = a.repeat_interleave(b.shape[dim] // a.shape[dim], dim)
    return product(b.transpose(-1, -2), a.transpose(-1, -2).expand(*b.shape[:2], -1, -1))


@reference("MUL_MAT_ID_BACK", stored=("weights",))
def mul_mat_id_back(node: Tensor, weights: torch.Tensor, d: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """weights: [1, n_expert, m, k]; d: [1, n_tokens, n_used, m]; ids: [1, 1, n_tokens, n_used]. One expert's matrix is
    decoded at a time."""
    source = node["weights"]
    out = d.new_full(node.shape, math.nan)
    for expert in sorted(set(ids.reshape(-1).tolist())):
        if 0 <= expert < source.ne[2]:
            chosen = ids[0] == expert
            out[chosen] = d[chosen] @ decode(weights[0, expert], source.dtype, d.dtype)
    return out


@reference("OUT_PROD_ID")
def out_prod_id(node: Tensor, x: torch.Tensor, d: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x: [1, n_tokens, 1 or n_used, k]; d: [1, n_tokens, n_used, m]; ids: [1, 1, n_tokens, n_used]."""
    x = x.expand(-1, -1, d.shape[2], -1)
    chosen = [ids[0] == expert for expert in range(node.ne[2])]
    return torch.stack([d[of].transpose(0, 1) @ x[of] for of in chosen])[None]


# -- losses and steps


def _powers(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e^x and x, the logits less the largest of their row."""
    x = (logits - logits.amax(-1, keepdim=True)).contiguous()
    return torch.exp(x), x


@reference("CROSS_ENTROPY_LOSS")
def cross_entropy_loss(node: Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = logits.shape[0] * logits.shape[1] * logits.shape[2]
    powers, x = _powers(logits)
    return (-(labels * (x - torch.log(powers.sum(-1, keepdim=True)))).sum() / rows).reshape(node.shape)


@reference("CROSS_ENTROPY_LOSS_BACK")
def cross_entropy_loss_back(node: Tensor, d: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = logits.shape[0] * logits.shape[1] * logits.shape[2]
    powers, _ = _powers(logits)
    shares = powers / powers.sum(-1, keepdim=True)
    return d * (shares * labels.sum(-1, keepdim=True) - labels) / rows


@reference("OPT_STEP_SGD")
def opt_step_sgd(node: Tensor, a: torch.Tensor, grad: torch.Tensor, hyper: torch.Tensor) -> torch.Tensor:
    alpha, wd = map(float, hyper.reshape(-1))
    return a * (1.0 - alpha * wd) - alpha * grad


@reference("OPT_STEP_ADAMW")
def opt_step_adamw(
    node: Tensor, a: torch.Tensor, m: torch.Tensor, v: torch.Tensor, hyper: torch.Tensor
) -> torch.Tensor:
    alpha, eps, wd, m_h, v_h = map(float, hyper.reshape(-1))
    return a * (1.0 - alpha * wd) - alpha * (m * m_h) / (torch.sqrt(v * v_h) + eps)
