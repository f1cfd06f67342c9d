"""Attention by its definition: torch's own attention with a mask made pair by pair.

A key that n branches show to a query counts n times under one softmax, which is a bias of log n.
"""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention


def branches_of(head, heads, segment_lengths, dilation_rates, mode, offsets):
    """(segment, dilation, offset) of every branch of a head."""
    branches = list(zip(segment_lengths, dilation_rates))
    if mode == "mix":
        for w, r in branches:
            yield w, r, head % r if offsets == "head-mod" else head // -(-heads // r)
        return
    first = 0
    for i, (w, r) in enumerate(branches):
        share = heads // len(branches) + (i < heads % len(branches))
        if first <= head < first + share:
            yield w, r, i % r
        first += share


def mask(tokens, heads, causal, pattern):
    """Log of the multiplicity of each (query, key) pair: [heads, tokens, tokens]."""
    count = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for head in range(heads):
        if pattern is None:
            count[head] = 1
            continue
        for w, r, offset in branches_of(head, heads, *pattern):
            for start in range(0, tokens, w):
                own = list(range(start + offset, min(start + w, tokens), r))
                for q in own:
                    count[head, q, own] += 1
    if causal:
        count = count.tril()
    return count.log()


def attention(
    q,
    k,
    v,
    *,
    segment_lengths=None,
    dilation_rates=None,
    mode="group",
    offsets="head-mod",
    causal=False,
    scale=None,
):
    """out and lse of [b, n, h, d] tensors."""
    _, tokens, heads, dim = q.shape
    pattern = None
    if segment_lengths is not None:
        pattern = (segment_lengths, dilation_rates, mode, offsets)
    bias = mask(tokens, heads, causal, pattern).to(q.dtype)
    group = heads // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    sees = bias.isfinite().any(-1)[None, :, :, None]
    # A row without keys would be 0/0 in torch: it gets all keys, and is zeroed afterwards.
    safe = torch.where(sees[0], bias, torch.zeros_like(bias))
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out = scaled_dot_product_attention(q, k, v, attn_mask=safe, scale=scale)
    out = torch.where(sees, out, torch.zeros_like(out))
    scores = q @ k.transpose(-1, -2) * scale + safe
    lse = scores.logsumexp(-1)
    lse = torch.where(sees[..., 0], lse, torch.full_like(lse, -math.inf))
    return out.transpose(1, 2), lse.transpose(1, 2)
