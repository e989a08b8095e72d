"""Measures hopper backward kernels beside torch's SDPA. usage: hb_probe.py check|time ..."""
import math, sys, itertools, torch, numpy as np
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from concurrent.futures import ThreadPoolExecutor
from graphrt.backends.triton.kernels.flash_attn.hopper import backward_launch as bl
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rows import WEIGHT_BITS
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import config_of
dev = "cuda"

def lists(mask, bn):
    """class of [128 x bn] blocks of mask [m3,m2,nq,nk] -> plan and turned lists"""
    m3, m2, nq, nk = mask.shape
    NQ, NK = -(-nq // 128), -(-nk // bn)
    pad = F.pad(mask, (0, NK * bn - nk, 0, 0), value=-math.inf)
    hid = pad == -math.inf; plain = pad == 0
    rows = torch.arange(NQ * 128, device=mask.device).clamp(max=nq - 1)
    h = hid[:, :, rows].reshape(m3, m2, NQ, 128, NK, bn); f = plain[:, :, rows].reshape(m3, m2, NQ, 128, NK, bn)
    kind = torch.where(h.all(5).all(3), 0, torch.where(f.all(5).all(3), 1, 2)).cpu().numpy().reshape(m3 * m2, NQ, NK)
    see = (~h).any(3).reshape(m3 * m2, NQ, NK, bn // 32, 32).cpu().numpy()
    seen = (see.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1).astype(np.uint32).view(np.int32)
    def make(k):
        n, a, b = k.shape
        counts = np.zeros((n, a, 2), np.int32); blocks = np.zeros((n, a, b), np.int32)
        for i in range(n):
            for j in range(a):
                full, part = np.flatnonzero(k[i, j] == 1), np.flatnonzero(k[i, j] == 2)
                counts[i, j] = len(full), len(part); blocks[i, j, : len(full) + len(part)] = np.concatenate([full, part])
        return torch.from_numpy(counts).to(dev), torch.from_numpy(blocks).to(dev)
    return make(kind), make(kind.transpose(0, 2, 1).copy()), torch.from_numpy(seen).to(dev)

def problem(d, h, hk, nq, nk, kind, mask, softcap=0.0, slopes=None, seed=0, b=1):
    g = torch.Generator(device=dev).manual_seed(seed)
    r = lambda *s: torch.randn(s, generator=g, device=dev)
    q, k, v, do = r(b, h, nq, d), r(b, hk, nk, d).to(kind), r(b, hk, nk, d).to(kind), r(b, h, nq, d)
    return q.to(kind).float(), k, v, do.to(kind).float()

def forward64(q, k, v, mask, scale, softcap, slopes):
    gq = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(gq, 1), v.double().repeat_interleave(gq, 1)
    s = q.double() @ k.transpose(-1, -2) * scale
    if softcap: s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        mm = mask.double() * (1.0 if slopes is None else slopes.double()[None, :, None, None])
        s = s + torch.where(mask == -math.inf, mask.double(), torch.nan_to_num(mm))
    lse = torch.logsumexp(s, -1)
    w = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return w, s, lse, k, v

def reference(q, k, v, do, mask, scale, softcap, slopes):
    w, s, lse, kk, vv = forward64(q, k, v, mask, scale, softcap, slopes)
    out = w @ vv
    dd = do.double()
    delta = (dd * out).sum(-1)
    ds = w * (dd @ vv.transpose(-1, -2) - delta[..., None])
    if softcap:
        t = q.double() @ kk.transpose(-1, -2) * scale / softcap
        ds = ds * (1 - torch.tanh(t) ** 2)
    hk = k.shape[1]; g = q.shape[1] // hk
    red = lambda x: x.reshape(x.shape[0], hk, g, *x.shape[2:]).sum(2)
    return out, lse, delta, ds @ kk * scale, red(ds.transpose(-1, -2) @ q.double()) * scale, red(w.transpose(-1, -2) @ dd)

def given(q, k, v, do, lse, delta, mask, scale, softcap, slopes, d_scale=1.0, s_scale=1.0):
    kind = k.dtype
    bits = WEIGHT_BITS if kind == torch.float16 else 0
    b, h, nq, d = q.shape
    padded = -(-nq // 128) * 128
    rows = torch.zeros(b, h, 2, padded, device=dev); rows[:, :, 0] = math.inf
    l2 = lse.float() / math.log(2) - bits
    rows[:, :, 0, :nq] = torch.where(l2 == -math.inf, math.inf, l2)
    rows[:, :, 1, :nq] = delta.float() * s_scale / 2**bits
    return bl.Given(q.to(kind).contiguous(), (do * d_scale).to(kind).contiguous(), k, v, rows,
                    torch.tensor([d_scale, s_scale], device=dev), mask, slopes, scale, softcap)

def launches(x, cfgk=None, cfgq=None, want=("k", "v")):
    new = lambda t: torch.full(t.shape, math.nan, device=dev)
    dq, dk, dv = new(x.q), new(x.k), new(x.v)
    ck, cq = config_of('keys', x.d, x.softcap != 0), config_of('queries', x.d, x.softcap != 0)
    tk = tq = (None, None); seen = None
    if x.mask is not None:
        tk = lists(x.mask, ck.block_n)[1]
        tq, _, seen = lists(x.mask, cq.block_n)
    a = bl.keys_launch(x, *tk, dk if "k" in want else None, dv if "v" in want else None)
    b = bl.queries_launch(x, *tq, seen, dq)
    return a, b, dq, dk, dv

def err(a, e):
    return ((a.double() - e).norm() / e.norm()).item()

def causal(nq, nk, window=0, dist=False):
    i = torch.arange(nq, device=dev)[:, None] + nk - nq; j = torch.arange(nk, device=dev)[None]
    hid = j > i
    if window: hid = hid | (j <= i - window)
    base = -(i - j).abs().float() if dist else torch.zeros(nq, nk, device=dev)
    return base.masked_fill(hid, -math.inf).half()[None, None]

def check(name, d, h, hk, nq, nk, kind, mask=None, softcap=0.0, slopes=None, b=1, scales=(1.0, 1.0), want=("k", "v")):
    q, k, v, do = problem(d, h, hk, nq, nk, kind, mask, b=b)
    scale = d**-0.5 * (4.0 if softcap else 1.0)
    out, lse, delta, rq, rk, rv = reference(q, k, v, do, mask, scale, softcap, slopes)
    x = given(q, k, v, do, lse, delta, mask, scale, softcap, slopes, *scales)
    a, bq, dq, dk, dv = launches(x, want=want)
    a(); bq(); torch.cuda.synchronize()
    es = [err(dq, rq), err(dk, rk) if "k" in want else 0, err(dv, rv) if "v" in want else 0]
    tol = 3e-3 if kind == torch.float16 else 1.2e-2
    print(("ok  " if max(es) < tol and not any(map(math.isnan, es)) else "BAD "), name, d, (h, hk), (nq, nk), str(kind)[6:], "dq dk dv %.2g %.2g %.2g" % tuple(es), flush=True)

def bench(f, n=20):
    for _ in range(3): f()
    torch.cuda.synchronize()
    ts = []
    for _ in range(3):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(n): f()
        b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) / n)
    return sorted(ts)[1]

def speed(d, h, hk, n, kind, how, softcap=0.0, peer=True, cfgs=((None, None),), n_rep=10):
    mask = None if how == "full" else causal(n, n, dist=how == "alibi")
    slopes = torch.full((h,), 0.1, device=dev) if how == "alibi" else None
    q, k, v, do = problem(d, h, hk, n, n, kind, mask)
    scale = d**-0.5
    flop = 10.0 * n * n * d * h / (1 if how == "full" else 2)
    lse = torch.full((1, h, n), math.log(n), device=dev); delta = torch.zeros(1, h, n, device=dev)
    text = f"D{d} H{h}/{hk} S{n} {str(kind)[6:]} {how} cap{softcap:g}:"
    for cfg in cfgs:
        x = given(q, k, v, do, lse, delta, mask, scale, softcap, slopes)
        a, b, *_ = launches(x, *cfg)
        ta, tb = bench(a, n_rep), bench(b, n_rep)
        text += f" keys {ta*1e3:.0f}us ({flop*.8/ta/1e9:.0f} TF of 4 products) queries {tb*1e3:.0f}us ({flop*.6/tb/1e9:.0f}) both {flop/(ta+tb)/1e9:.0f} TF;"
    if peer:
        Q, K, V = (t.to(kind).detach().requires_grad_() for t in (q, k, v))
        for be, nm in ((SDPBackend.CUDNN_ATTENTION, "cudnn"), (SDPBackend.FLASH_ATTENTION, "flash")):
            try:
                with sdpa_kernel(be):
                    o = F.scaled_dot_product_attention(Q, K, V, is_causal=how != "full", enable_gqa=h != hk)
                g = do.to(kind)
                t = bench(lambda: torch.autograd.grad(o, (Q, K, V), g, retain_graph=True), n_rep)
                text += f" {nm} {flop/t/1e9:.0f}"
            except Exception as e:
                text += f" {nm} {type(e).__name__}"
    print(text, flush=True)

def graph(d, h, hk, n, kind, how, softcap=0.0, sinks=False, of=("q", "k", "v"), n_rep=10, form="split"):
    import graphrt
    from graphrt import ops
    from graphrt.graph import Graph
    from graphrt.tensor import new_input
    from graphrt.ops.flash_attn_ext import FlashAttnParams
    from graphrt.backends.triton.backend import TritonBackend
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[kind]
    t = lambda k, *ne, nm: new_input(k, *ne, name=nm)
    q, k, v = t("f32", d, n, h, nm="q"), t(name, d, n, hk, nm="k"), t(name, d, n, hk, nm="v")
    out, dout, lse = t("f32", d, h, n, nm="out"), t("f32", d, h, n, nm="dout"), t("f32", h, n, nm="lse")
    mask = None if how == "full" else t("f16", n, n, nm="mask")
    sk = t("f32", h, nm="sinks") if sinks else None
    par = FlashAttnParams(d**-0.5, 8.0 if how == "alibi" else 0.0, softcap)
    nodes = [ops.flash_attn_back(o, dout, q, k, v, out, lse, par, mask=mask, sinks=sk) for o in (*of, *(("sinks",) if sinks else ()))]
    exe = graphrt.prepare(Graph(*nodes), TritonBackend(exact=False, backward=form))
    host = lambda x, n: x if n == "f32" else x.astype(np.float16) if n == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    rng = np.random.default_rng(0)
    for x in (q, k, v, out, dout): exe.write(x, host(rng.standard_normal(x.shape, dtype=np.float32), x.dtype.name))
    exe.write(lse, np.full(lse.shape, math.log(n), np.float32))
    if sk is not None: exe.write(sk, np.zeros(sk.shape, np.float32))
    if mask is not None: exe.write(mask, causal(n, n, dist=how == "alibi").cpu().numpy())
    exe.run(); exe.run(); torch.cuda.synchronize()
    if n_rep > 100:
        first = [np.array(exe.read(x)) for x in nodes]; same = True
        for _ in range(n_rep):
            exe.run(); same = same and all(np.array_equal(a, exe.read(x)) for a, x in zip(first, nodes))
        print(f"{n_rep} runs bitwise equal: {same}", how, d, flush=True); return
    ms = bench(exe.run, n_rep)
    flop = 10.0 * n * n * d * h / (1 if how == "full" else 2)
    print(f"graph {form} D{d} H{h}/{hk} S{n} {name} {how} cap{softcap:g} sinks{int(sinks)}: {ms*1e3:.0f}us {flop/ms/1e9:.0f} TF", flush=True)

f16, bf16 = torch.float16, torch.bfloat16
if __name__ == "__main__":
    exec(sys.argv[1])
