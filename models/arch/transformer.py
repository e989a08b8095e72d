"""What every transformer here shares: its weights, norms, projections and feed-forward. The graphs of decoders and of
encoders, skeleton.py and encoder.py, are made of it.

A family sets the data at the top of Transformer and overrides the small methods in which it differs.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphrt import ops
from graphrt.models.arch.layout import Affine, Attention, Experts, Extra, FeedForward, Layer, Layout, Loader
from graphrt.models.hparam_keys import VARIANTS
from graphrt.models.hparam_sizes import check_sizes
from graphrt.models.hparams import HParams, Keys, Traits, read_hparams, refuse_variants
from graphrt.models.weights import Weights
from graphrt.ops import RopeParams
from graphrt.tensor import Tensor

#: Activations of gated feed-forwards, by what GLU calls them together with the product.
GLU_OF = {"silu": "swiglu", "gelu": "geglu"}


class Transformer:
    """Grouped heads, norms, a feed-forward.

    traits: norm and rotation; activation: "silu" or "gelu"; layout: the tensors; variants: keys that must be 0, and
    what is not implemented otherwise.
    """

    traits = Traits()
    activation = "silu"
    layout = Layout()
    variants: Mapping[str, str] = VARIANTS

    @classmethod
    def read(cls, keys: Keys) -> HParams:
        """The hyperparameters of a file of this family. Raises ArchError for what it does not do."""
        refuse_variants(keys, cls.variants, cls.activation)
        hp = cls.hparams(keys)
        check_sizes(hp)
        return hp

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        """read() without its checks: families add the keys that are theirs."""
        return read_hparams(keys, cls.traits)

    def __init__(self, hp: HParams, weights: Weights) -> None:
        self.hp = hp
        self.weights = weights
        self.share = weights.share
        load = Loader(weights, self.layout)
        self.token_embd = weights("token_embd.weight", hp.n_embd, hp.n_vocab)
        self.position_embd = load.tensor("position_embd.weight", self.layout.positions, hp.n_embd, hp.n_ctx_train)
        self.load(load)
        self.layers = [self.load_layer(Loader(weights, self.layout, f"blk.{il}."), il) for il in range(hp.n_layer)]

    def load(self, load: Loader) -> None:
        """Weights outside of layers beside the embeddings."""

    def load_layer(self, load: Loader, il: int) -> Layer:
        n, layout = self.hp.n_embd, self.layout
        return Layer(
            attn_norm=load.norm("attn_norm", n, layout.attn_norm),
            attention=self.load_attention(load, il),
            ffn_norm=load.norm(layout.ffn_norm_name, n, layout.ffn_norm),
            feed_forward=self.load_feed_forward(load, il),
            extra=load.extra(self.extra_weights(il)),
        )

    def load_attention(self, load: Loader, il: int) -> Attention | None:
        return load.attention(self.hp, il)

    def load_feed_forward(self, load: Loader, il: int) -> FeedForward | Experts | None:
        return load.feed_forward(self.hp, il)

    def extra_weights(self, il: int) -> dict[str, Extra]:
        """Weights that a layer has beside the common ones, by their names without ".weight"."""
        return {}

    def share_of_token(self, weight: Tensor) -> float:
        """The part of a weight that one token needs: of experts' tensors those of the experts that it is given."""
        p = self.hp.experts
        return p.used / p.n if p is not None and "_exps." in weight.name else 1.0

    # ---- parts of graphs ----

    def normed(self, x: Tensor, weight: Affine | None, name: str) -> Tensor:
        """The norm of x over ne[0], times the weight, plus the bias; x itself without a weight."""
        if weight is None:
            return x
        prefix, dash, layer = name.partition("-")
        x = self.bare_norm(x, f"norm_{prefix}-{layer}" if dash else "norm")
        if weight.bias is None:
            return ops.mul(x, weight.weight, name)
        scaled = ops.mul(x, weight.weight, f"norm_w_{prefix}-{layer}" if dash else "norm_w")
        return ops.add(scaled, weight.bias, name)

    def bare_norm(self, x: Tensor, name: str = "") -> Tensor:
        """The norm of x over ne[0] without a weight."""
        norm = ops.rms_norm if self.traits.norm == "rms" else ops.norm
        return norm(x, self.hp.norm_eps, name=name)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The rows of the embedding, with those of the positions added where there are any: [n_embd, n_tokens]."""
        x = ops.get_rows(self.token_embd, tokens, name="inp_embd")
        if self.position_embd is None:
            return x
        return ops.add(x, ops.get_rows(self.position_embd, positions, name="pos_embd"), name="inpL")

    def qkv(self, il: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k: [d_k, heads, n_tokens]; v: [d_v * heads, n_tokens]. They have gaps where they are parts of one."""
        hp, w = self.hp, self.layers[il].attention
        assert w is not None
        n_tokens, n_head, n_head_kv = x.ne[1], hp.n_head[il], hp.n_head_kv[il]
        if len(w.qkv) == 3:
            q, k, v = (self.clamped(linear(m, x, f"{c}cur-{il}"), f"{c}cur_clamped-{il}") for m, c in zip(w.qkv, "QKV"))
            return ops.reshape(q, hp.d_k, n_head, n_tokens), ops.reshape(k, hp.d_k, n_head_kv, n_tokens), v
        both = linear(w.qkv[0], x, f"wqkv_b-{il}", f"wqkv-{il}")
        if w.biases:
            q_bias, k_bias, v_bias = w.biases
            both = ops.add(both, ops.concat(ops.concat(q_bias, k_bias, 0), v_bias, 0), name=f"wqkv_b-{il}")
        both = self.clamped(both, f"wqkv_clamped-{il}")
        head, row = both.dtype.row_size(hp.d_k), both.nb[1]
        return (
            ops.view(both, (hp.d_k, n_head, n_tokens), (head, row), name=f"Qcur-{il}"),
            ops.view(both, (hp.d_k, n_head_kv, n_tokens), (head, row), head * n_head, name=f"Kcur-{il}"),
            ops.view(both, (hp.d_v * n_head_kv, n_tokens), (row,), head * (n_head + n_head_kv), name=f"Vcur-{il}"),
        )

    def clamped(self, x: Tensor, name: str) -> Tensor:
        limit = self.hp.clamp_kqv
        return ops.clamp(x, -limit, limit, name=name) if limit else x

    def query_key_norm(self, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norms on the heads of q and k before the rotation, where the family has them: [d_k, heads, n_tokens]."""
        extra = self.layers[il].extra
        q = self.normed(q, extra.get("attn_q_norm"), f"Qcur_normed-{il}")
        return q, self.normed(k, extra.get("attn_k_norm"), f"Kcur_normed-{il}")

    def normed_together(self, heads: Tensor, weight: Affine | None, name: str) -> Tensor:
        """The norm over all heads of a token together: [d_k, heads, n_tokens]."""
        d, n_head, n_tokens = heads.ne[:3]
        flat = ops.reshape(heads if heads.is_contiguous else ops.cont(heads), d * n_head, n_tokens)
        if self.share is None or self.share.ranks == 1 or weight is None:
            return ops.reshape(self.normed(flat, weight, name), d, n_head, n_tokens)
        normed = self.share.over_all(flat, weight.weight.name, self.bare_norm)
        scaled = ops.mul(normed, weight.weight, name)
        scaled = scaled if weight.bias is None else ops.add(scaled, weight.bias, name)
        return ops.reshape(scaled, d, n_head, n_tokens)

    def rope_params(self, il: int) -> RopeParams | None:
        """The rotation of layer il, None for none."""
        local = self.hp.local_rope if self.hp.windowed[il] else None
        return local or self.hp.rope

    def rotated(self, il: int, t: Tensor, positions: Tensor, n_ctx: int, name: str) -> Tensor:
        """q or k at its positions. n_ctx: the context that the session has room for."""
        rope = self.rope_params(il)
        return t if rope is None else ops.rope(t, positions, rope, self.rope_factors(n_ctx), name=name)

    def rope_factors(self, n_ctx: int) -> Tensor | None:
        """Divisors of the rotation's frequencies, f32 [n_dims / 2]."""
        return None

    def feed_forward(self, il: int, x: Tensor) -> Tensor:
        """[n_embd, n] to the same."""
        w = self.layers[il].feed_forward
        assert isinstance(w, FeedForward)
        if self.layout.feed_forward == "plain":
            bent = self.activated(il, linear(w.up, x, f"ffn_up_b-{il}", f"ffn_up-{il}"))
        elif self.layout.feed_forward == "fused":
            both = linear(w.up, x, f"ffn_up_b-{il}", f"ffn_up-{il}")
            bent = ops.glu(both, None, GLU_OF[self.activation], name=f"ffn_glu-{il}")
        else:
            bent = self.gated(il, w, x)
        return linear(w.down, bent, f"ffn_out-{il}", f"ffn_down-{il}" if w.down.bias is not None else "")

    def gated(self, il: int, w: FeedForward, x: Tensor) -> Tensor:
        """The activated gate times up: [n_embd, n] to [n_ff, n]."""
        assert w.gate is not None
        gate = linear(w.gate, x, f"ffn_gate_b-{il}", f"ffn_gate-{il}")
        up = linear(w.up, x, f"ffn_up_b-{il}", f"ffn_up-{il}")
        return ops.glu(gate, up, GLU_OF[self.activation], name=f"ffn_glu-{il}")

    def activated(self, il: int, x: Tensor) -> Tensor:
        """What a feed-forward without a gate does to each element."""
        return ops.unary(x, self.activation, name=f"ffn_{self.activation}-{il}")


def linear(w: Affine, x: Tensor, name: str, product: str = "") -> Tensor:
    """weight x + bias, called `name`; `product`: what llama.cpp calls the product before the bias is added."""
    if w.bias is None:
        return ops.mul_mat(w.weight, x, name=product or name)
    return ops.add(ops.mul_mat(w.weight, x, name=product), w.bias, name=name)
