"""A step of LoRA in plain torch, of models of the architecture llama: bf16 weights and activations, torch's own
attention, autograd, and its fused AdamW, captured as one CUDA graph where that works."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from graphrt.host import host_type
from graphrt.models.model import Model
from graphrt.models.training.lora import LoraOptions
from graphrt.models.training.trainer import AdamW
from graphrt.ops.rope import rope_frequencies
from graphrt.tensor import Tensor
from graphrt.testing import dequantize as dequantize_blocks

T = torch.Tensor


def why_not(model: Model) -> str | None:
    """Why this can't be a model's peer, None where it can."""
    hp = model.decoder.hp
    if hp.arch != "llama" or hp.experts is not None or hp.rope is None or hp.rope.mode != "normal":
        return "it knows dense models of the architecture llama"
    return None


def dequantized(leaf: Tensor, device: str) -> T:
    """A weight's values in torch's shape, [rows, columns] or [columns]."""
    from graphrt.backends.triton.kernels.dequantize import dequantize
    from graphrt.backends.triton.packing import PackedBuffer

    buffer = leaf.buffer
    assert buffer is not None
    if isinstance(buffer, PackedBuffer):
        out = torch.empty(leaf.ne[1], leaf.ne[0], dtype=torch.float16, device=device)
        dequantize(buffer.packed, out)()
        return out
    raw = buffer.read(leaf.offset, leaf.nbytes)
    shape = leaf.ne[1::-1] if leaf.n_dims == 2 else leaf.ne[:1]
    stored = raw.reshape(shape[0], -1) if leaf.dtype.is_quantized else raw.view(host_type(leaf.dtype)).reshape(shape)
    return torch.tensor(np.asarray(dequantize_blocks(stored, leaf.dtype), np.float32), device=device)


class PlainLlama:
    """Trains copies of given adapters, by name of their weight. device; kind: of weights and activations, adapters are
    f32, or f64 if these are. what: says how it runs."""

    def __init__(
        self, model: Model, adapters: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
        lora: LoraOptions, optimizer: AdamW, device: str = "cuda", kind: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.hp = model.decoder.hp
        self.device, self.kind = device, kind
        on_gpu = device != "cpu"
        self.scale = lora.alpha / lora.rank
        decoder = model.decoder
        self.weights = {name: dequantized(t, device).to(kind) for name, t in model.weights.loaded.items()}
        self.output = self.weights[decoder.output.name]
        self._own = own = torch.promote_types(kind, torch.float32)
        self.lora = {
            name: [torch.tensor(side, device=device, dtype=own, requires_grad=True) for side in both]
            for name, both in adapters.items()
        }
        trained = [side for both in self.lora.values() for side in both]
        self.optimizer = torch.optim.AdamW(
            trained, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps,
            weight_decay=optimizer.weight_decay, fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip
        self.graph: torch.cuda.CUDAGraph | None = None
        self.what = f"torch {torch.__version__}, {str(kind).removeprefix('torch.')}, eager"
        self.ids: T | None = None
        self.loss: T | None = None

    def step(self, ids: npt.NDArray[np.int32]) -> float:
        """The loss before a step."""
        if self.ids is None:
            self.ids = torch.tensor(ids, device=self.device, dtype=torch.int64)
            self._tables(len(ids))
            if self.device != "cpu":
                self._capture()
        self.ids.copy_(torch.tensor(ids))
        if self.graph is not None:
            self.graph.replay()
        else:
            self._once()
        assert self.loss is not None
        return float(self.loss.detach())

    def _capture(self) -> None:
        """One step to warm up, then the same captured; eager where torch can't."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._once(update=False)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._once()
        except RuntimeError as error:
            self.what += f" ({str(error).partition(chr(10))[0][:60]})"
            return
        self.graph, self.what = graph, self.what.replace("eager", "captured")

    def _once(self, update: bool = True) -> None:
        assert self.ids is not None
        self.optimizer.zero_grad(set_to_none=True)
        logits = self._logits(self.ids)
        self.loss = F.cross_entropy(logits[:-1].to(self._own), self.ids[1:])
        self.loss.backward()  # type: ignore[no-untyped-call]
        if update:
            self.optimizer.step()

    def _tables(self, n: int) -> None:
        """cos and sin of each position and pair."""
        assert self.hp.rope is not None
        factors = self.weights.get("rope_freqs.weight")
        theta, magnitude = rope_frequencies(self.hp.rope)
        angle = torch.tensor(theta, dtype=torch.float64, device=self.device)
        if factors is not None:
            angle = angle / factors.double()
        angle = torch.arange(n, device=self.device, dtype=torch.float64)[:, None] * angle
        self.cos, self.sin = ((f(angle) * magnitude).to(self._own)[:, None] for f in (torch.cos, torch.sin))

    def _logits(self, ids: T) -> T:
        hp = self.hp
        x = F.embedding(ids, self.weights["token_embd.weight"])
        for il in range(hp.n_layer):
            h = self._norm(x, f"blk.{il}.attn_norm.weight")
            q, k, v = (self._linear(h, f"blk.{il}.attn_{c}.weight") for c in "qkv")
            x = x + self._linear(self._attention(il, q, k, v), f"blk.{il}.attn_output.weight")
            h = self._norm(x, f"blk.{il}.ffn_norm.weight")
            gate, up = (self._linear(h, f"blk.{il}.ffn_{c}.weight") for c in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"blk.{il}.ffn_down.weight")
        return F.linear(self._norm(x, "output_norm.weight"), self.output)

    def _norm(self, x: T, name: str) -> T:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.hp.norm_eps)

    def _linear(self, x: T, name: str) -> T:
        y = F.linear(x, self.weights[name], self.weights.get(f"{name.removesuffix('weight')}bias"))
        if name not in self.lora:
            return y
        a, b = self.lora[name]
        return y + F.linear(F.linear(x, a.to(self.kind)) * self.scale, b.to(self.kind))

    def _attention(self, il: int, q: T, k: T, v: T) -> T:
        """[n, heads * d] each to [n, heads * d]."""
        hp, n = self.hp, q.shape[0]
        q, k, v = (t.view(n, -1, hp.d_k) for t in (q, k, v))
        q, k = self._rotated(q), self._rotated(k)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=hp.attn_scale, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(n, -1)

    def _rotated(self, t: T) -> T:
        """[n, heads, d], neighbouring pairs turned."""
        x, y = t[..., ::2].to(self._own), t[..., 1::2].to(self._own)
        return torch.stack((x * self.cos - y * self.sin, x * self.sin + y * self.cos), -1).flatten(-2).to(t.dtype)
