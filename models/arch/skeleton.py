"""The skeleton that every decoder shares: embedding, layers of attention over a cache and feed-forward, logits of
chosen rows.

A family overrides the small methods in which it differs. Node names are llama.cpp's, so that dumps lie side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphrt import ops
from graphrt.errors import ArchError
from graphrt.graph import Graph
from graphrt.models.adapters import Adapters
from graphrt.models.arch.layout import Loader
from graphrt.models.arch.transformer import Transformer, linear
from graphrt.models.attention import AttentionParams
from graphrt.models.cache import KVCache, LayerCache
from graphrt.models.cache_paged import PagedCache
from graphrt.models.hparams import HParams, Keys
from graphrt.models.ranks.share import Share, alibi_runs
from graphrt.models.sampling_device import RowInputs, SampleTables
from graphrt.models.step import AnyInputs, StepInputs
from graphrt.models.step_paged import PagedInputs, StepSize
from graphrt.ops import SampleParams
from graphrt.tensor import Tensor, new_input


class Decoder(Transformer):
    """A decoder-only transformer, norms first. residual: the name of what a layer's attention leaves; ffn_normed: of
    its norm; parallel: without a norm of its own the feed-forward reads what the attention reads; adapters: what its
    logits are made with, None for its weights alone."""

    residual = "ffn_inp"
    ffn_normed = "ffn_norm"
    parallel = False
    adapters: Adapters | None = None

    @property
    def cached(self) -> list[HParams]:
        """Of what caches are made: its own, or its stage's, or each rank's where several are played."""
        return [self.hp if self.share is None else self.share.held(self.hp)]

    @property
    def stages(self) -> int:
        """Of a pipeline, one of which this is; 1 for all layers in one place."""
        return 1 if self.share is None else self.share.stages

    @classmethod
    def read(cls, keys: Keys) -> HParams:
        hp = super().read(keys)
        if not hp.causal:
            raise ArchError(f"{keys.name('attention.causal')} must be true, {keys.arch} models are decoders here")
        return hp

    def load(self, load: Loader) -> None:
        n, layout, share = self.hp.n_embd, self.layout, self.share
        n_vocab = self.hp.n_vocab if share is None else share.vocab[share.rank]
        self.output_norm = load.norm("output_norm", n)
        output = load.affine("output", (n, n_vocab), layout.output)
        bias = load.tensor("output.bias", layout.output_bias, n_vocab)
        self.output = output.weight if output is not None else self.weights.tied(self.token_embd)
        self.output_bias = bias

    def inputs(self, n: int, n_outputs: int, cache: KVCache) -> StepInputs:
        """New inputs of a step that reads n tokens of each sequence and gives the logits of n_outputs of them."""
        tokens = new_input("i32", n * cache.n_seq, name="inp_tokens")
        return StepInputs.of(cache, tokens, n_outputs, self.hp.max_alibi_bias > 0, gates=self._usual_gates)

    @property
    def adapter_key(self) -> bytes:
        """What tells sequences whose adapters have their usual scales from others (Adapters.key())."""
        return b"" if self.adapters is None else self.adapters.key(self.adapters.scales)

    @property
    def _usual_gates(self) -> Tensor | None:
        return None if self.adapters is None or not any(self.adapters.scales) else self.adapters.usual

    def paged_inputs(self, size: StepSize, cache: PagedCache, gates: Tensor | None = None) -> PagedInputs:
        """The same of a step over pages, of up to so many tokens of up to so many sequences. gates: which adapters
        sequences have (AdapterTable), None for none."""
        return PagedInputs.of(cache, size, gates=gates)

    def graph(self, n: int, n_outputs: int, cache: KVCache) -> Graph:
        """The graph of such a step over rings. Output: result_output, f32 [n_vocab, n_outputs]."""
        return Graph(self.result(self.inputs(n, n_outputs, cache)))

    def chained(
        self, tokens: Tensor, cache: KVCache, sampling: SampleParams | None = None, *, keep_logits: bool = False
    ) -> tuple[StepInputs, Graph]:
        """A step that reads its tokens, one a sequence, from `tokens`, a leaf i32 [n_seq] with a buffer, and writes the
        next ones there, the likeliest or, with `sampling`, drawn ones: the next step can be queued before the host
        knows them. keep_logits: these are an output too."""
        alibi, draws = self.hp.max_alibi_bias > 0, sampling is not None
        inputs = StepInputs.of(cache, tokens, cache.n_seq, alibi, draws=draws, gates=self._usual_gates)
        return inputs, self._choosing(inputs, inputs.tokens, sampling, keep_logits)

    def paged_scored(
        self,
        board: Tensor,
        size: StepSize,
        cache: PagedCache,
        scores: Tensor,
        gates: Tensor | None = None,
        *,
        keep_logits: bool = False,
    ) -> tuple[PagedInputs, Graph]:
        """The same over pages, of any tokens: `board` is a leaf i32 [1, rows] with a buffer, where the step finds its
        tokens in any order. It leaves the logits of wanted rows in the first rows of `scores`, a leaf f32 [n_vocab,
        rows] with a buffer, for a graph of choices(). gates: as paged_inputs()."""
        inputs = PagedInputs.of(cache, size, board, gates=gates)
        logits = self.result(inputs)
        kept = ops.cpy(logits, ops.view(scores, (self.hp.n_vocab, size.n_outputs)), name="scores")
        return inputs, Graph(kept, *([logits] if keep_logits else []))

    def paged_chosen(
        self, board: Tensor, size: StepSize, cache: PagedCache, gates: Tensor | None = None,
        tables: SampleTables | None = None, most: int = 0, *, keep_logits: bool = False,
    ) -> tuple[PagedInputs, Graph]:  # fmt: skip
        """paged_scored() and choices() as one graph, which keeps no logits unless asked to."""
        inputs = PagedInputs.of(cache, size, board, gates=gates, chooses=True)
        assert inputs.choice is not None
        logits = self.result(inputs)
        ends = self._chosen(logits, inputs.choice, board, tables, most)
        return inputs, Graph(*ends, *([logits] if keep_logits else []))

    def choices(
        self, scores: Tensor, n: int, board: Tensor, tables: SampleTables | None = None, most: int = 0
    ) -> tuple[RowInputs, Graph]:
        """Chooses the next tokens of the first n rows of `scores`, the likeliest or as these tables say, of at most so
        many candidates, and leaves them on the board where the inputs say."""
        rows, logits = RowInputs.of(n), ops.view(scores, (self.hp.n_vocab, n))
        return rows, Graph(*self._chosen(logits, rows, board, tables, most))

    def _chosen(
        self, logits: Tensor, rows: RowInputs, board: Tensor, tables: SampleTables | None, most: int
    ) -> list[Tensor]:
        """The nodes that put the next tokens where the rows say."""
        chosen, *said = [ops.argmax(logits)] if tables is None else tables.choose(logits, rows, most)
        return [self._put(chosen, rows.targets, board), *said]

    def _put(self, chosen: Tensor, targets: Tensor, board: Tensor) -> Tensor:
        """Tokens i32 [n] go to rows of the board."""
        chosen = chosen if self.share is None else self.share.agreed(chosen)
        return ops.set_rows(ops.reshape(chosen, 1, chosen.ne[0]), targets, board, name="next_token")

    def _choosing(self, inputs: AnyInputs, target: Tensor, sampling: SampleParams | None, keep_logits: bool) -> Graph:
        """Writes the next token of each wanted row to `target`, i32 [n_outputs]."""
        if sampling is None and not keep_logits and self.stages > 1:
            return Graph(ops.cpy(self._likeliest_of_last_stage(inputs), target, name="next_token"))
        logits = self.result(inputs)
        if sampling is None:  # logits have the same bits on every rank, and so has the likeliest
            chosen = ops.argmax(logits)
        else:
            assert inputs.uniform is not None
            chosen = ops.sample(logits, inputs.uniform, sampling)
            chosen = chosen if self.share is None else self.share.agreed(chosen)
        ends = [ops.cpy(chosen, target, name="next_token"), *([logits] if keep_logits else [])]
        return Graph(*ends)

    def result(self, step: AnyInputs) -> Tensor:
        """The logits of a step: f32 [n_vocab, n_outputs]."""
        if self.share is not None and self.share.stages > 1:
            made = self._of_last_stage(self._passed(step), self.logits, (self.hp.n_vocab, step.rows.ne[0]))
        else:
            made = self.logits(self.hidden(step))
        return self._adapted(made, step)

    def _adapted(self, made: Tensor, step: AnyInputs) -> Tensor:
        return made if self.adapters is None or step.gates is None else self.adapters.added(made, step)

    def hidden(self, step: AnyInputs) -> Tensor:
        """What the logits are made of, the tokens' embeddings: f32 [n_embd, n_outputs]."""
        x = self._passed(step)
        if self.share is None or self.share.stages == 1:
            return x
        return self._of_last_stage(x, lambda x: x, (self.hp.n_embd, step.rows.ne[0]))

    def passed(self, step: AnyInputs) -> Tensor:
        """A step of which nobody wants logits, but what it leaves in the cache."""
        x = self._passed(step)
        if self.adapters is not None and (self.share is None or self.share.is_last):
            x = self.logits(x)  # there may be adapters of what makes them
        return self._adapted(x, step)

    def _passed(self, step: AnyInputs) -> Tensor:
        """Tokens through the layers: what the logits are made of, f32 [n_embd, n_outputs]. One stage of a pipeline has
        it from the stage before, [n_embd, n_tokens], and what it has given the next one is the result of all but the
        last."""
        share, n = self.share, step.tokens.n_elements
        own = share.layers if share is not None and share.layers else range(self.hp.n_layer)
        if share is None or share.is_first:
            x = self.embed(step.tokens, step.positions)
        else:
            x = share.taken(step.tokens, share.stage - 1, "f32", (self.hp.n_embd, n), f"l_in-{own[0]}")
        for i, il in enumerate(own):
            x = self.layer(il, x, step, step.layers[i])
        if share is None or share.is_last:
            return self.normed(x, self.output_norm, "result_norm")
        return share.given(x, share.stage + 1, f"l_given-{own[-1]}")

    def _likeliest_of_last_stage(self, step: AnyInputs) -> Tensor:
        """The likeliest next tokens on all stages of a pipeline, i32 [n_outputs], of which no more goes back than they
        are."""
        share, x = self.share, self._passed(step)
        assert share is not None
        x = ops.argmax(self._adapted(self.logits(x), step)) if share.is_last else self._adapted(x, step)
        return share.everywhere(x, share.stages - 1, "last_stages_tokens", step.rows.ne[:1], "i32")

    def _of_last_stage(self, x: Tensor, made: Callable[[Tensor], Tensor], ne: tuple[int, int]) -> Tensor:
        """What the last stage makes of what its layers have passed, f32 of that shape, on all stages. x: _passed()."""
        share = self.share
        assert share is not None
        return share.everywhere(made(x) if share.is_last else x, share.stages - 1, "result_output", ne)

    def layer(self, il: int, x: Tensor, step: AnyInputs, cache: LayerCache) -> Tensor:
        w = self.layers[il]
        before = self.normed(x, w.attn_norm, f"attn_norm-{il}")
        attn = self.attention(il, self.attention_source(il, x, before), step, cache)
        beside = self.parallel and w.ffn_norm is None
        if il == self.hp.n_layer - 1:  # from here on only the tokens whose logits are wanted
            attn, x = ops.get_rows(attn, step.rows), ops.get_rows(x, step.rows)
            before = ops.get_rows(before, step.rows) if beside else before
        attn = self.joined(attn, f"attn_joined-{il}")
        h = ops.add(self.after_attention(il, attn), x, name=f"{self.residual}-{il}")
        f = self.feed_forward(il, before if beside else self.normed(h, w.ffn_norm, f"{self.ffn_normed}-{il}"))
        f = self.joined(f, f"ffn_joined-{il}")
        return ops.add(self.after_feed_forward(il, f), h, name=f"l_out-{il}")

    def joined(self, x: Tensor, name: str) -> Tensor:
        """x, of which each of several ranks has a part of the sum."""
        return x if self.share is None else self.share.joined(x, name)

    def attention_source(self, il: int, x: Tensor, normed: Tensor) -> Tensor:
        """What attention reads of a layer's input x and its norm."""
        return normed

    def after_attention(self, il: int, x: Tensor) -> Tensor:
        return x

    def after_feed_forward(self, il: int, x: Tensor) -> Tensor:
        return x

    def attention(self, il: int, x: Tensor, step: AnyInputs, cache: LayerCache) -> Tensor:
        """[n_embd, n_tokens] to the same; writes the tokens into the cache."""
        w = self.layers[il].attention
        assert w is not None
        q, k, v = self.qkv(il, x)
        q, k = self.query_key_norm(il, q, k)
        q = self.rotated(il, q, step.positions, step.n_ctx, f"Qcur_rope-{il}")
        k = self.rotated(il, k, step.positions, step.n_ctx, f"Kcur_rope-{il}")
        merged = self.attend(il, q, k, v, step, cache)
        return linear(w.out, merged, f"attn_out-{il}")

    def attend(self, il: int, q: Tensor, k: Tensor, v: Tensor, step: AnyInputs, cache: LayerCache) -> Tensor:
        """Attention over the cache, after k and v are written there, v unless it lies in k: [d_v * heads, n_tokens]."""
        hp, n_seq = self.hp, step.n_seq
        n_head_kv, cells = hp.n_head_kv[il], step.cells[cache.kind]
        k_cache = ops.set_rows(_rows(k, hp.d_k * n_head_kv, n_seq), cells, cache.k, name=f"cache_k_l{il} (set)")
        keys = step.heads(k_cache, hp.d_k, n_head_kv)
        if cache.v is None:
            values = ops.view(keys, (hp.d_v, *keys.ne[1:]), keys.nb[1:])
        else:
            v = v if n_seq == 1 else _rows(v, hp.d_v * n_head_kv, n_seq)
            v_cache = ops.set_rows(v, cells, cache.v, name=f"cache_v_l{il} (set)")
            values = step.heads(v_cache, hp.d_v, n_head_kv)
        params = AttentionParams(hp.attn_scale, hp.max_alibi_bias, hp.attn_softcap, self.sinks(il))
        q = q if n_seq == 1 else _by_sequence(q, n_seq)
        if self.share is not None and self.share.ranks > 1 and hp.max_alibi_bias:
            attn = self._with_slopes(il, self.share, q, keys, values, step, cache.kind)
        else:
            attn = step.attended(q, keys, values, cache.kind, params, f"__fattn__-{il}")
        return self.merged(il, attn)

    def _with_slopes(
        self, il: int, share: Share, q: Tensor, k: Tensor, v: Tensor, step: AnyInputs, kind: str
    ) -> Tensor:
        """attended() where a rank has some heads of many, each of which keeps the slope that it has among all."""
        hp, found = self.hp, list[Tensor]()
        group = hp.n_head[il] // hp.n_head_kv[il]
        for run in alibi_runs(share.n_head(il), share.mine(il), hp.max_alibi_bias, group):
            n_kv, first = max(1, run.n // group), run.first // group
            queries, keys, values = _of_heads(q, 1, run.first, run.n), *(_of_heads(t, 2, first, n_kv) for t in (k, v))
            params = AttentionParams(hp.attn_scale, run.max_bias, hp.attn_softcap, None)
            found.append(step.attended(queries, keys, values, kind, params, f"__fattn__-{il}.{run.first}"))
        return functools.reduce(lambda a, b: ops.concat(a, b, 1), found)

    def merged(self, il: int, attn: Tensor) -> Tensor:
        """What the heads found, [d_v, heads, n, n_seq], side by side: [d_v * heads, n_tokens]."""
        d_v, n_head, n, n_seq = attn.ne
        return ops.reshape(attn, d_v * n_head, n * n_seq, name=f"kqv_out-{il}")

    def sinks(self, il: int) -> Tensor | None:
        """One more logit of each head without a value: f32 [n_head]."""
        return None

    def logits(self, x: Tensor) -> Tensor:
        """[n_embd, n_outputs] to result_output: times the matrix, plus its bias, scaled and softly capped."""
        hp = self.hp
        x = ops.mul_mat(self.output, x)
        if self.output_bias is not None:
            x = ops.add(x, self.output_bias)
        if self.share is not None:
            x = self.share.side_by_side(x, self.share.vocab, "result_gathered")
        if hp.logit_scale:
            x = ops.scale(x, hp.logit_scale)
        if hp.final_softcap:
            bent = ops.unary(ops.scale(x, 1.0 / hp.final_softcap), "tanh")
            x = ops.scale(bent, hp.final_softcap)
        return x.named("result_output")


def _rows(t: Tensor, width: int, n_seq: int) -> Tensor:
    """Tokens [..., n_tokens] of `width` elements as a cache is written: [width, n, n_seq]."""
    n = t.n_elements // width // n_seq
    if t.is_contiguous:
        return ops.reshape(t, width, n, n_seq)
    stride = t.nb[2] if t.ne[0] * t.ne[1] == width else t.nb[1]  # heads apart, or a token's in one row
    return ops.view(t, (width, n, n_seq), (stride, stride * n))


def _of_heads(t: Tensor, dim: int, first: int, n: int) -> Tensor:
    """A view of some heads, which lie along dimension `dim`."""
    if n == t.ne[dim]:
        return t
    ne = tuple(n if i == dim else size for i, size in enumerate(t.ne))
    return ops.view(t, ne, t.nb[1:], first * t.nb[dim])


def _by_sequence(q: Tensor, n_seq: int) -> Tensor:
    """[d, heads, n_tokens] as [d, heads, n, n_seq]."""
    n = q.ne[2] // n_seq
    if q.is_contiguous:
        return ops.reshape(q, q.ne[0], q.ne[1], n, n_seq)
    return ops.view(q, (q.ne[0], q.ne[1], n, n_seq), (q.nb[1], q.nb[2], q.nb[2] * n))
