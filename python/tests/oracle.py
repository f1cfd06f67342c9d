"""Attention by its definition: torch's own attention with a mask made pair by pair.

A key that n branches show to a query counts n times under one softmax, which is a bias of log n.
"""

import math

import numpy
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


def visible(tokens, queries, causal, window, prefix, documents, query_offset):
    """Which query sees which key: [queries, tokens], pair by pair."""
    left, right = window or (None, None)
    firsts = []
    for length in documents or [tokens]:
        firsts += [len(firsts)] * length
    first_query = tokens - queries if query_offset is None else query_offset
    sees = torch.zeros(queries, tokens, dtype=torch.bool)
    for i in range(queries):
        x = i + first_query
        for j in range(tokens):
            within = (left is None or x - j <= left) and (right is None or j - x <= right)
            shown = within or j < firsts[j] + prefix
            sees[i, j] = shown and (not causal or j <= x) and firsts[x] == firsts[j]
    return sees


def mask(tokens, heads, pattern, documents, first_query, queries):
    """In how many branches a query sees a key: [heads, queries, tokens]."""
    count = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for head in range(heads):
        if pattern is None:
            count[head] = 1
            continue
        first = 0
        for length in documents or [tokens]:
            for w, r, offset in branches_of(head, heads, *pattern):
                for start in range(0, length, w):
                    own = range(first + start + offset, first + min(start + w, length), r)
                    for q in own:
                        count[head, q, list(own)] += 1
            first += length
    return count[:, first_query : first_query + queries]


def philox(counter, key):
    """Philox4x32 with ten rounds of arrays of 32-bit words."""
    counter, key = [numpy.uint64(word) for word in counter], list(key)
    low = numpy.uint64(0xFFFFFFFF)
    for _ in range(10):
        first = counter[0] * numpy.uint64(0xD2511F53)
        second = counter[2] * numpy.uint64(0xCD9E8D57)
        counter = [
            (second >> numpy.uint64(32)) ^ counter[1] ^ numpy.uint64(key[0]),
            second & low,
            (first >> numpy.uint64(32)) ^ counter[3] ^ numpy.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def dropped(rate, seed, shape, first_query, tokens, documents):
    """The factor of each pair: 0, or 1 / (1 - rate): [batch, heads, queries, tokens]."""
    batch, queries, heads = shape[:3]
    firsts = []
    for length in documents or [tokens]:
        firsts += [len(firsts)] * length
    entry, head, query, key = numpy.ogrid[:batch, :heads, :queries, :tokens]
    document = numpy.array(firsts)[query + first_query]
    key = key + 0 * (entry + head + query)
    counter = [key // 4, query + first_query + 0 * key, head + heads * entry + 0 * key]
    words = philox([*counter, document + 0 * key], [seed % 2**32, seed >> 32])
    coins = numpy.choose(key % 4, words)
    kept = torch.tensor(coins.astype(numpy.float64)) >= rate * 2**32
    return kept.double() / (1 - rate)


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
    window=None,
    prefix=0,
    documents=None,
    key_lengths=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    query_offset=None,
    dropout=0.0,
    seed=None,
):
    """out and lse of [b, n, h, d] tensors."""
    (batch, queries, heads, dim), tokens = q.shape, k.shape[1]
    pattern = None
    if segment_lengths is not None:
        pattern = (segment_lengths, dilation_rates, mode, offsets)
    first_query = tokens - queries if query_offset is None else query_offset
    count = mask(tokens, heads, pattern, documents, first_query, queries)
    count = count * visible(tokens, queries, causal, window, prefix, documents, query_offset)
    count = count.expand(batch, -1, -1, -1).clone()
    for entry, length in enumerate(key_lengths or ()):
        count[entry, :, :, length:] = 0
        count[entry, :, length:] = 0
    bias = count.log().to(q.dtype)
    group = heads // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    sees = bias.isfinite().any(-1, keepdim=True)
    # A row without keys would be 0/0 in torch: it gets all keys, and is zeroed afterwards.
    bias = torch.where(sees, bias, torch.zeros_like(bias))
    scale = 1 / math.sqrt(dim) if scale is None else scale
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        positions = torch.arange(queries) + first_query
        distance = (positions[:, None] - torch.arange(tokens)).abs()
        if alibi_slopes is True:
            alibi_slopes = [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
        slopes = torch.as_tensor(alibi_slopes, dtype=q.dtype)
        scores = scores - slopes[:, None, None] * distance
    scores = scores + bias
    lse = scores.logsumexp(-1)
    lse = torch.where(sees[..., 0], lse, torch.full_like(lse, -math.inf))
    if dropout:
        factors = dropped(dropout, seed, (batch, queries, heads), first_query, tokens, documents)
        out = (scores.softmax(-1) * factors) @ v
    elif softcap is None and alibi_slopes is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    else:
        out = scores.softmax(-1) @ v
    out = torch.where(sees, out, torch.zeros_like(out))
    if sinks is not None:
        # One more key without a value: the softmax of all but that, times the rest of the weight.
        sinks = sinks.to(q.dtype)[None, :, None].expand_as(lse)
        with_sinks = torch.logaddexp(torch.where(sees[..., 0], lse, sinks - 1e3), sinks)
        with_sinks = torch.where(sees[..., 0], with_sinks, sinks)
        weight = (torch.where(sees[..., 0], lse, sinks) - with_sinks).exp()
        out, lse = out * weight[..., None], with_sinks
        if key_lengths is not None:
            padded = torch.arange(queries) >= torch.tensor(key_lengths)[:, None, None]
            out = out.masked_fill(padded[..., None], 0.0)
            lse = lse.masked_fill(padded, -math.inf)
    return out.transpose(1, 2), lse.transpose(1, 2)
