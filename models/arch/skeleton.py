"""The skeleton that every decoder shares: embedding, layers of attention and feed-forward, logits of chosen rows.

A family overrides the small methods in which it differs. Node names are llama.cpp's, so that dumps lie side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from graphrt import ops
from graphrt.graph import Graph
from graphrt.models.cache import KVCache, LayerCache
from graphrt.models.hparams import HParams, Keys
from graphrt.models.weights import Weights
from graphrt.ops import RopeParams, SampleParams
from graphrt.tensor import Tensor, new_input


@dataclass(frozen=True)
class Step:
    """The inputs of one graph. tokens, positions: i32 [n_tokens], those of a sequence side by side, equally many of
    each; rows: i32 [n_outputs], the tokens whose logits are wanted; cells: i64 [n, n_seq] and mask: f16 [cells, n, 1,
    n_seq] by the kind of cache, n = n_tokens / n_seq."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    cells: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of a layer; None where the family or the file has none."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    extra: Mapping[str, Tensor]


class Decoder(ABC):
    """A decoder-only transformer: pre-norm, grouped heads, rotary positions, gated feed-forward."""

    activation = "swiglu"

    @classmethod
    @abstractmethod
    def read(cls, keys: Keys) -> HParams:
        """The hyperparameters of a file of this family. Raises ArchError for what the family does not do."""

    def __init__(self, hp: HParams, weights: Weights) -> None:
        self.hp = hp
        self.token_embd = weights("token_embd.weight", hp.n_embd, hp.n_vocab)
        self.output_norm = weights("output_norm.weight", hp.n_embd)
        output = weights("output.weight", hp.n_embd, hp.n_vocab, optional=True)
        self.output = output if output is not None else self.token_embd  # tied
        self.rope_factors = weights("rope_freqs.weight", hp.rope.n_dims // 2, optional=True)
        self.layers = [self.load_layer(weights, il) for il in range(hp.n_layer)]

    def load_layer(self, weights: Weights, il: int) -> Layer:
        hp, prefix = self.hp, f"blk.{il}."
        d_q, d_k, d_v = hp.d_k * hp.n_head[il], hp.d_k * hp.n_head_kv[il], hp.d_v * hp.n_head_kv[il]
        d_out, n_ff = hp.d_v * hp.n_head[il], hp.n_ff[il]

        def weight(name: str, *ne: int) -> Tensor:
            return weights(f"{prefix}{name}.weight", *ne)

        def bias(name: str, n: int) -> Tensor | None:
            return weights(f"{prefix}{name}.bias", n, optional=True)

        return Layer(
            attn_norm=weight("attn_norm", hp.n_embd),
            q=weight("attn_q", hp.n_embd, d_q),
            k=weight("attn_k", hp.n_embd, d_k),
            v=weight("attn_v", hp.n_embd, d_v),
            q_bias=bias("attn_q", d_q),
            k_bias=bias("attn_k", d_k),
            v_bias=bias("attn_v", d_v),
            out=weight("attn_output", d_out, hp.n_embd),
            out_bias=bias("attn_output", hp.n_embd),
            ffn_norm=weight("ffn_norm", hp.n_embd),
            gate=weight("ffn_gate", hp.n_embd, n_ff),
            up=weight("ffn_up", hp.n_embd, n_ff),
            down=weight("ffn_down", n_ff, hp.n_embd),
            gate_bias=bias("ffn_gate", n_ff),
            up_bias=bias("ffn_up", n_ff),
            down_bias=bias("ffn_down", hp.n_embd),
            extra={name: weight(name, *ne) for name, ne in self.extra_weights().items()},
        )

    def extra_weights(self) -> dict[str, tuple[int, ...]]:
        """Weights that a layer has beside the common ones: name and shape."""
        return {}

    def rope_params(self, il: int) -> RopeParams:
        local = self.hp.local_rope if self.hp.windowed[il] else None
        return local or self.hp.rope

    def graph(self, n_tokens: int, n_outputs: int, cache: KVCache) -> Graph:
        """The graph of one step. Inputs: inp_tokens, inp_pos, inp_out_ids, attn_inp_k_idxs and attn_inp_kq_cells (with
        _swa for windows). Output: result_output, f32 [n_vocab, n_outputs]."""
        tokens = new_input("i32", n_tokens, name="inp_tokens")
        return Graph(self.result(_inputs(tokens, n_outputs, cache), cache))

    def chained_graph(self, token: Tensor, cache: KVCache, sampling: SampleParams | None = None) -> Graph:
        """The graph of one step that reads its tokens, one a sequence, from `token`, a leaf i32 [n_seq] with a buffer,
        and writes the next ones there, the likeliest or, with `sampling`, drawn ones: the next step can be queued
        before the host knows them. The other inputs are graph()'s, and inp_uniform, f64 [n_seq], to draw by."""
        logits = self.result(_inputs(token, cache.n_seq, cache), cache)
        if sampling is None:
            chosen = ops.argmax(logits)
        else:
            chosen = ops.sample(logits, new_input("f64", cache.n_seq, name="inp_uniform"), sampling)
        return Graph(ops.cpy(chosen, token, name="next_token"))

    def result(self, step: Step, cache: KVCache) -> Tensor:
        """The logits of a step: f32 [n_vocab, n_outputs]."""
        x = self.embed(step)
        for il in range(self.hp.n_layer):
            x = self.layer(il, x, step, cache.layers[il])
        x = self.normed(x, self.output_norm, "result_norm")
        return self.logits(x)

    def embed(self, step: Step) -> Tensor:
        return ops.get_rows(self.token_embd, step.tokens, name="inp_embd")

    def normed(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        prefix, _, layer = name.partition("-")
        return ops.mul(
            ops.rms_norm(x, self.hp.norm_eps, name=f"norm_{prefix}-{layer}" if layer else "norm"), weight, name
        )

    def layer(self, il: int, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        w = self.layers[il]
        attn = self.attention(il, self.normed(x, w.attn_norm, f"attn_norm-{il}"), step, cache)
        if il == self.hp.n_layer - 1:  # from here on only the tokens whose logits are wanted
            attn, x = ops.get_rows(attn, step.rows), ops.get_rows(x, step.rows)
        h = ops.add(self.after_attention(il, attn), x, name=f"ffn_inp-{il}")
        f = self.feed_forward(il, self.normed(h, w.ffn_norm, f"ffn_norm-{il}"))
        return ops.add(self.after_feed_forward(il, f), h, name=f"l_out-{il}")

    def after_attention(self, il: int, x: Tensor) -> Tensor:
        return x

    def after_feed_forward(self, il: int, x: Tensor) -> Tensor:
        return x

    def query_key_norm(self, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norms on q and k before the rotation: [head size, heads, n_tokens]."""
        return q, k

    def attention(self, il: int, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        w, hp = self.layers[il], self.hp
        n_tokens, n_head, n_head_kv = x.ne[1], hp.n_head[il], hp.n_head_kv[il]
        n_seq = cache.k.ne[2]
        n = n_tokens // n_seq
        q = ops.reshape(linear(w.q, x, w.q_bias, f"Qcur-{il}"), hp.d_k, n_head, n_tokens)
        k = ops.reshape(linear(w.k, x, w.k_bias, f"Kcur-{il}"), hp.d_k, n_head_kv, n_tokens)
        v = linear(w.v, x, w.v_bias, f"Vcur-{il}")
        q, k = self.query_key_norm(il, q, k)
        rope, factors = self.rope_params(il), self.rope_factors
        q = ops.rope(q, step.positions, rope, factors, name=f"Qcur_rope-{il}")
        k = ops.rope(k, step.positions, rope, factors, name=f"Kcur_rope-{il}")
        cells = step.cells[cache.kind]
        k_cache = ops.set_rows(
            ops.reshape(k, hp.d_k * n_head_kv, n, n_seq), cells, cache.k, name=f"cache_k_l{il} (set)"
        )
        v = v if n_seq == 1 else ops.reshape(v, hp.d_v * n_head_kv, n, n_seq)
        v_cache = ops.set_rows(v, cells, cache.v, name=f"cache_v_l{il} (set)")
        attn = ops.flash_attn_ext(
            ops.permute(q if n_seq == 1 else ops.reshape(q, hp.d_k, n_head, n, n_seq), 0, 2, 1, 3),
            heads_view(k_cache, hp.d_k, n_head_kv),
            heads_view(v_cache, hp.d_v, n_head_kv),
            step.masks[cache.kind],
            hp.attn_scale,
            name=f"__fattn__-{il}",
        )
        merged = ops.reshape(attn, hp.d_v * n_head, n_tokens, name=f"kqv_out-{il}")
        return linear(w.out, merged, w.out_bias, f"attn_out-{il}")

    def feed_forward(self, il: int, x: Tensor) -> Tensor:
        w = self.layers[il]
        gate = linear(w.gate, x, w.gate_bias, f"ffn_gate-{il}")
        up = linear(w.up, x, w.up_bias, f"ffn_up-{il}")
        return linear(w.down, ops.glu(gate, up, self.activation, name=f"ffn_glu-{il}"), w.down_bias, f"ffn_out-{il}")

    def logits(self, x: Tensor) -> Tensor:
        cap = self.hp.final_softcap
        if not cap:
            return ops.mul_mat(self.output, x, name="result_output")
        bent = ops.unary(ops.scale(ops.mul_mat(self.output, x), 1.0 / cap), "tanh")
        return ops.scale(bent, cap, name="result_output")


def linear(weight: Tensor, x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """weight x + bias. The name goes to the last node of it."""
    if bias is None:
        return ops.mul_mat(weight, x, name=name)
    return ops.add(ops.mul_mat(weight, x), bias, name=name)


def heads_view(cache: Tensor, head_size: int, n_head: int) -> Tensor:
    """A cache [heads * head size, cells, n_seq] as attention reads it: [head size, cells, heads, n_seq]."""
    ne = (head_size, cache.ne[1], n_head, cache.ne[2])
    return ops.view(cache, ne, (cache.nb[1], cache.dtype.row_size(head_size), cache.nb[2]))


def _inputs(tokens: Tensor, n_outputs: int, cache: KVCache) -> Step:
    cells, masks = {}, {}
    n_tokens = tokens.ne[0]
    n = n_tokens // cache.n_seq
    positions = new_input("i32", n_tokens, name="inp_pos")
    by_sequence = positions if cache.n_seq == 1 else ops.reshape(positions, n, cache.n_seq)
    for kind, ring in cache.rings.items():
        suffix = "_swa" if kind == "swa" else ""
        cells[kind] = new_input("i64", n, cache.n_seq, name=f"attn_inp_k_idxs{suffix}")
        held = new_input("i32", ring.size, cache.n_seq, name=f"attn_inp_kq_cells{suffix}")
        masks[kind] = ops.kq_mask(held, by_sequence, ring.window, name=f"attn_inp_kq_mask{suffix}")
    return Step(tokens, positions, new_input("i32", n_outputs, name="inp_out_ids"), cells, masks)
