"""deepseek2: DeepSeek V2 and V3 and what shares their file layout. Attention over one short row a token, of which keys
and values are made (multi-head latent attention); experts, some of them for every token, after a few dense layers.

The matrices that make k and v of the row are multiplied with q and with what attention found instead, so that attention
has one head of keys, the row itself with the rotated part behind it, and v is the beginning of k.
"""

from __future__ import annotations

from dataclasses import replace

from graphrt import ops
from graphrt.errors import ArchError
from graphrt.models.arch.experts import Mixture, MixtureDecoder
from graphrt.models.arch.layout import OPTIONAL, Attention, ExpertLayout, Extra, Layout, Loader
from graphrt.models.arch.transformer import linear
from graphrt.models.cache import LayerCache
from graphrt.models.hparams import HParams, Keys, LatentParams, yarn_mscale
from graphrt.models.step import AnyInputs
from graphrt.tensor import Tensor

#: GLM 4.7 Flash by its layers and vocabulary: files of it that name no gating mean sigmoid.
GLM_LAYERS, GLM_VOCAB = (47, 48), 154880


class DeepSeek2(MixtureDecoder):
    """The skeleton with latent attention and experts."""

    layout = Layout(experts=ExpertLayout(choice_bias=OPTIONAL, merged=True))
    mixture = Mixture("softmax", norm=False, stated=True)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        if not keys.has("attention.key_length_mla"):
            raise ArchError(
                f"deepseek2 files must have {keys.name('attention.key_length_mla')}; this one is of the older "
                f"kind with attn_kv_b: convert the model again, or use a newer file of it"
            )
        hp = super().hparams(keys)
        if keys.amount("attention.temperature_scale", 0.0):
            raise ArchError(
                f"{keys.name('attention.temperature_scale')} must be 0: scales that grow with the position are not "
                f"implemented in deepseek2 models"
            )
        latent = LatentParams(
            n_kv=keys.count("attention.kv_lora_rank"),
            n_q=keys.get("attention.q_lora_rank", int, 0),
            d_k=keys.count("attention.key_length_mla"),
            d_v=keys.count("attention.value_length_mla"),
        )
        _check_sizes(keys, hp, latent)
        return _of_glm(keys, _with_mscale(keys, replace(hp, latent=latent)))

    @classmethod
    def expert_width(cls, keys: Keys, hp: HParams) -> int:
        return keys.count("expert_feed_forward_length")

    def load_attention(self, load: Loader, il: int) -> Attention | None:
        return None

    def extra_weights(self, il: int) -> dict[str, Extra]:
        hp, p = self.hp, self.hp.latent
        assert p is not None
        n_head, rotated = hp.n_head[il], hp.d_k - p.n_kv
        q = {"attn_q": (hp.n_embd, n_head * p.d_k)}
        if p.n_q:
            q = {"attn_q_a": (hp.n_embd, p.n_q), "attn_q_b": (p.n_q, n_head * p.d_k)}
        shapes: dict[str, tuple[int, ...]] = {
            **q,
            **({"attn_q_a_norm": (p.n_q,)} if p.n_q else {}),
            "attn_kv_a_mqa": (hp.n_embd, hp.d_k),
            "attn_kv_a_norm": (p.n_kv,),
            "attn_k_b": (p.d_k - rotated, p.n_kv, n_head),
            "attn_v_b": (p.n_kv, p.d_v, n_head),
            "attn_output": (n_head * p.d_v, hp.n_embd),
        }
        return {name: Extra(ne) for name, ne in shapes.items()}

    def attention(self, il: int, x: Tensor, step: AnyInputs, cache: LayerCache) -> Tensor:
        k = self.row(il, x, step)
        found = self.attend(il, self.query(il, x, step), k, k, step, cache)
        return linear(self.layers[il].extra["attn_output"], found, f"attn_out-{il}")

    def query(self, il: int, x: Tensor, step: AnyInputs) -> Tensor:
        """What meets the rows of the cache: [n_kv + rotated, heads, n_tokens]."""
        hp, p, w = self.hp, self.hp.latent, self.layers[il].extra
        assert p is not None
        n_head, n_tokens, plain = hp.n_head[il], x.ne[1], p.d_k - (hp.d_k - p.n_kv)
        if p.n_q:
            x = self.normed(linear(w["attn_q_a"], x, f"q_a-{il}"), w["attn_q_a_norm"], f"q_a_normed-{il}")
        q = linear(w["attn_q_b" if p.n_q else "attn_q"], x, f"q-{il}")
        q = ops.reshape(q, p.d_k, n_head, n_tokens)
        q_nope = ops.view(q, (plain, n_head, n_tokens), q.nb[1:3], name=f"q_nope-{il}")
        q_pe = ops.view(q, (p.d_k - plain, n_head, n_tokens), q.nb[1:3], plain * q.nb[0], name=f"q_pe-{il}")
        q_pe = self.rotated(il, q_pe, step.positions, step.n_ctx, f"q_pe_rope-{il}")
        by_head = ops.permute(q_nope, 0, 2, 1, 3, name=f"q_nope_perm-{il}")
        absorbed = ops.mul_mat(w["attn_k_b"].weight, by_head, name=f"q_nope_absorbed-{il}")
        absorbed = ops.permute(absorbed, 0, 2, 1, 3, name=f"q_nope_absorbed_perm-{il}")
        return ops.concat(absorbed, q_pe, 0, name=f"Qcur-{il}")

    def row(self, il: int, x: Tensor, step: AnyInputs) -> Tensor:
        """What the cache holds of each token: [n_kv + rotated, 1, n_tokens]."""
        hp, p, w = self.hp, self.hp.latent, self.layers[il].extra
        assert p is not None
        n_tokens = x.ne[1]
        both = linear(w["attn_kv_a_mqa"], x, f"kv_cmpr_pe-{il}")
        row = both.nb[1]
        kv = ops.view(both, (p.n_kv, n_tokens), (row,), name=f"kv_cmpr-{il}")
        k_pe = ops.view(both, (hp.d_k - p.n_kv, 1, n_tokens), (row, row), p.n_kv * both.nb[0], name=f"k_pe-{il}")
        k_pe = self.rotated(il, k_pe, step.positions, step.n_ctx, f"k_pe_rope-{il}")
        kv = self.normed(kv, w["attn_kv_a_norm"], f"kv_cmpr_normed-{il}")
        kv = ops.reshape(kv, p.n_kv, 1, n_tokens, name=f"kv_cmpr_reshape-{il}")
        return ops.concat(kv, k_pe, 0, name=f"Kcur-{il}")

    def merged(self, il: int, attn: Tensor) -> Tensor:
        """Each head's v of the mixed rows [n_kv, heads, n, n_seq], side by side."""
        n_kv, n_head, n, n_seq = attn.ne
        by_head = ops.permute(ops.reshape(attn, n_kv, n_head, n * n_seq), 0, 2, 1, 3)
        v = ops.mul_mat(self.layers[il].extra["attn_v_b"].weight, by_head, name=f"fattn_mla-{il}")
        return ops.reshape(ops.cont(ops.permute(v, 0, 2, 1, 3)), v.ne[0] * n_head, n * n_seq, name=f"kqv_out-{il}")


def _check_sizes(keys: Keys, hp: HParams, latent: LatentParams) -> None:
    assert hp.rope is not None
    rotated = hp.rope.n_dims
    fits = (hp.d_k, hp.d_v) == (latent.n_kv + rotated, latent.n_kv) and latent.d_k > rotated
    if not fits or latent.n_q < 0 or set(hp.n_head_kv) != {1}:
        raise ArchError(
            f"deepseek2 needs one kv head of {keys.name('attention.kv_lora_rank')} + "
            f"{keys.name('rope.dimension_count')} elements, of which v is the first part, and larger heads of k than "
            f"rotate, got {hp.n_head_kv[0]} of {hp.d_k} and {hp.d_v} for {latent.n_kv} + {rotated}, and "
            f"{latent.d_k}; the file is damaged"
        )


def _with_mscale(keys: Keys, hp: HParams) -> HParams:
    """The scale on q.k, which YaRN's multiplier changes; then nothing is left to the rotation's magnitude."""
    assert hp.rope is not None and hp.latent is not None
    rope = hp.rope
    multiplier = keys.amount("rope.scaling.yarn_log_multiplier", 0.0) * 10.0  # files store a tenth of it
    if multiplier and rope.ext_factor:
        given = keys.get("rope.scaling.attn_factor", float, 1.0)
        rope = replace(rope, attn_factor=given / yarn_mscale(rope.freq_scale))
    whole = rope.attn_factor * yarn_mscale(rope.freq_scale) * yarn_mscale(rope.freq_scale, multiplier)
    return replace(hp, rope=rope, attn_scale=whole**2 * hp.latent.d_k**-0.5)


def _of_glm(keys: Keys, hp: HParams) -> HParams:
    silent = not keys.get("expert_gating_func", int, 0)
    if hp.experts is None or not silent or hp.n_layer not in GLM_LAYERS or hp.n_vocab != GLM_VOCAB:
        return hp
    return replace(hp, experts=replace(hp.experts, gating="sigmoid"))
