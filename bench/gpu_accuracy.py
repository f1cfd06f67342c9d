#!/usr/bin/env python3
"""The error of a ring on a GPU by its number of ranks, against f64, beside plain attention's.

    pip install ./python torch
    python3 bench/gpu_accuracy.py

A ring may add rounding only, and sums are carried in f32, so the error must not grow with the
number of ranks. The first four columns are the largest error of a tensor, as a share of what
FlashAttention's rule allows: twice the error of plain attention computed in the narrow type, plus
one rounding of the largest element; 1 would be the limit. The next four are the root-mean-square
error, relative to plain attention's. The last one is the share of out whose bits differ from those
of one rank, which shows that it is another ring.
"""

import torch
import encke

torch.manual_seed(7)
TOKENS, HEADS, DIM = 4096, 4, 128


def plain(q, k, v):
    """Softmax attention, causal, as torch computes it in the type of its inputs."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / DIM**0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def results(call, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = call(q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


print(f"{torch.cuda.get_device_name(0)}; {TOKENS} tokens, {HEADS} heads of {DIM}, causal, zigzag")
for dtype in (torch.bfloat16, torch.float16):
    q, k, v, dout = (torch.randn(1, TOKENS, HEADS, DIM, device="cuda").to(dtype) for _ in range(4))
    exact = results(plain, *(x.double() for x in (q, k, v, dout)))
    narrow = results(plain, q, k, v, dout)
    off = lambda got: [(x.double() - right).abs().max().item() for x, right in zip(got, exact)]
    floor = [torch.finfo(dtype).eps * right.abs().max().item() for right in exact]
    allowed = [2 * other + least for other, least in zip(off(narrow), floor)]
    mean = lambda got: [
        (x.double() - right).square().mean().sqrt().item() for x, right in zip(got, exact)
    ]
    usual = mean(narrow)
    names = "".join(f"{name:>8}" for name in ("out", "dq", "dk", "dv"))
    print(f"{str(dtype):16}{names}  |{names}  | other bits")
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        cut = {"ranks": ranks, "sharding": "zigzag"} if ranks > 1 else {}
        got = results(lambda q, k, v: encke.attention(q, k, v, causal=True, **cut), q, k, v, dout)
        alone = got[0] if ranks == 1 else alone
        shares = "".join(f"{x / y:8.3f}" for x, y in zip(off(got), allowed))
        means = "".join(f"{x / y:8.4f}" for x, y in zip(mean(got), usual))
        other = (got[0] != alone).double().mean().item()
        print(f"{ranks:10} ranks{shares}  |{means}  | {other:9.2%}", flush=True)
