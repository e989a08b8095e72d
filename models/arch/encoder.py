"""The skeleton that encoders share: every token of a text sees all others, nothing is cached, norms come after.

Node names are llama.cpp's, as in skeleton.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphrt import ops
from graphrt.graph import Graph
from graphrt.models.arch.layout import ABSENT, OPTIONAL, REQUIRED, UNUSED, Extra, Layout, Loader
from graphrt.models.arch.transformer import Transformer, linear
from graphrt.models.hparams import HParams, Keys, Traits
from graphrt.models.key_reader import INT32_MAX
from graphrt.tensor import Tensor, new_input


@dataclass(frozen=True)
class Texts:
    """The inputs of one graph. tokens, positions: i32 [n_tokens], one text after the other; starts: i32 [n_texts + 1],
    the first token of each text. Tokens from the last start on belong to none."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor

    @classmethod
    def of(cls, n_tokens: int, n_texts: int) -> Texts:
        """New inputs for up to so many."""
        return cls(
            new_input("i32", n_tokens, name="inp_tokens"),
            new_input("i32", n_tokens, name="inp_pos"),
            new_input("i32", n_texts + 1, name="attn_inp_q_starts"),
        )

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, name: str) -> Tensor:
        """Attention of each text's tokens over its own. q, k, v: [head size, n_tokens, heads]."""
        starts = self.starts
        return ops.flash_attn_varlen(q, k, v, starts, scale, k_starts=starts, causal=causal, name=name)


class Encoder(Transformer):
    """An encoder as BERT is."""

    traits = Traits(norm="layer", rope_mode=None)
    activation = "gelu"
    layout = Layout(
        attn_norm=ABSENT,
        ffn_norm=ABSENT,
        norm_bias=REQUIRED,
        out_bias=OPTIONAL,
        feed_forward="plain",
        ffn_bias=OPTIONAL,
        positions=REQUIRED,
    )

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        count = keys.all.whole("tokenizer.ggml.token_type_count", low=1, high=INT32_MAX)
        return replace(super().hparams(keys), n_token_types=count, cached=False)

    def load(self, load: Loader) -> None:
        n = self.hp.n_embd
        self.token_types = load.tensor("token_types.weight", OPTIONAL, n, self.hp.n_token_types)
        self.token_embd_norm = load.norm("token_embd_norm", n)
        for name in ("cls", "cls.output"):  # a reranker's head, which no embedding needs
            load.affine(name, (n,), UNUSED)

    def extra_weights(self, il: int) -> dict[str, Extra]:
        norm = Extra((self.hp.n_embd,), bias=REQUIRED)
        return {"attn_output_norm": norm, "layer_output_norm": norm}

    def graph(self, n_tokens: int, n_texts: int, pooling: str) -> Graph:
        """The graph of up to n_texts texts of up to n_tokens tokens together. Inputs: inp_tokens, inp_pos,
        attn_inp_q_starts; for the pooling "mean" inp_mean, f32 [n_tokens, n_texts], the weight of each token; for "cls"
        and "last" inp_cls, i32 [n_texts], the token of each text. Output: result_embd, f32 [n_embd, n_tokens], with
        the pooling "none", and else result_embd_pooled, f32 [n_embd, n_texts]."""
        return self.graph_of(Texts.of(n_tokens, n_texts), n_texts, pooling)

    def graph_of(self, texts: Texts, n_texts: int, pooling: str) -> Graph:
        """The same of these inputs."""
        return Graph(_pooled(self.result(texts), n_texts, pooling))

    def result(self, texts: Texts) -> Tensor:
        """The embedding of each token: f32 [n_embd, n_tokens]."""
        x = self.normed(self.embed(texts.tokens, texts.positions), self.token_embd_norm, "inp_norm")
        for il in range(self.hp.n_layer):
            x = self.layer(il, x, texts)
        return x.named("result_embd")

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Every token is of the first type, the only one that a single text has."""
        x = super().embed(tokens, positions)
        if self.token_types is None:
            return x
        return ops.add(x, ops.view(self.token_types, (self.hp.n_embd,)), name="inp_sum")

    def layer(self, il: int, x: Tensor, texts: Texts) -> Tensor:
        extra = self.layers[il].extra
        h = self.normed(ops.add(self.attention(il, x, texts), x), extra["attn_output_norm"], f"ffn_inp-{il}")
        return self.normed(ops.add(self.feed_forward(il, h), h), extra["layer_output_norm"], f"l_out-{il}")

    def attention(self, il: int, x: Tensor, texts: Texts) -> Tensor:
        """[n_embd, n_tokens] to the same."""
        hp, w, n_tokens = self.hp, self.layers[il].attention, x.ne[1]
        assert w is not None
        q, k, v = self.qkv(il, x)
        q, k = self.query_key_norm(il, q, k)
        q = self.rotated(il, q, texts.positions, hp.n_ctx_train, f"Qcur_rope-{il}")
        k = self.rotated(il, k, texts.positions, hp.n_ctx_train, f"Kcur_rope-{il}")
        heads = ops.view(v, (hp.d_v, hp.n_head_kv[il], n_tokens), (v.dtype.row_size(hp.d_v), v.nb[1]))
        q, k, v = (ops.permute(t, 0, 2, 1, 3) for t in (q, k, heads))
        # causal is llama.cpp's default where a file is silent
        attn = texts.attended(q, k, v, hp.attn_scale, hp.causal, f"__fattn__-{il}")
        merged = ops.reshape(attn, hp.d_v * hp.n_head[il], n_tokens, name=f"kqv_out-{il}")
        return linear(w.out, merged, f"attn_out-{il}")


def _pooled(x: Tensor, n_texts: int, pooling: str) -> Tensor:
    """[n_embd, n_tokens] to [n_embd, n_texts], or as it is."""
    if pooling == "none":
        return x
    if pooling == "mean":
        weights = new_input("f32", x.ne[1], n_texts, name="inp_mean")
        return ops.mul_mat(ops.cont(ops.transpose(x)), weights, name="result_embd_pooled")
    return ops.get_rows(x, new_input("i32", n_texts, name="inp_cls"), name="result_embd_pooled")
