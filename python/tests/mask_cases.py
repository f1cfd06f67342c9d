"""The cases of ring_cases.py about masks, scores and sinks. Not a test by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

import encke
import encke.distributed as ring
from ring_cases import GROUP, MIX, compare, raised, sums, tensors, uneven

TOKENS = 60
DOCUMENTS = [7, 0, 30, 1, 22]
MASKS = [
    dict(causal=True, window=(9, 0)),
    dict(window=(4, 11), prefix=3),
    dict(causal=True, documents=DOCUMENTS),
    dict(documents=DOCUMENTS, window=(6, 2), prefix=2, softcap=2.0, alibi_slopes=True),
    dict(MIX, documents=DOCUMENTS, causal=True),
    dict(GROUP, window=(12, 12), alibi_slopes=[0.5, 0.25, 0.0, 0.1]),
    dict(causal=True, window=(20, 0), checkpoint="recompute"),
    dict(causal=True, documents=DOCUMENTS, dropout=0.3, seed=2**63 + 5),
]


def cuts(options):
    """Every sharding of a call with these options."""
    kinds = [dict(sharding=kind) for kind in ("contiguous", "zigzag", "striped")]
    others = ("checkpoint", "dropout", "seed")
    pattern = {name: x for name, x in options.items() if name not in others}
    balanced = dict(sharding="balanced", heads=4, **pattern)
    by_document = dict(sharding="documents", documents=options.get("documents"))
    return [*kinds, dict(sizes=uneven(TOKENS, dist.get_world_size())), balanced, by_document]


def attend(function, given, sinks, **options):
    """(out, lse, dq, dk, dv, dsinks) of this rank's rows, or of all rows."""
    q, k, v, dout, dlse = (x.clone() for x in given)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sinks = sinks.clone().requires_grad_()
    out, lse = function(q, k, v, sinks=sinks, return_lse=True, **options)
    torch.autograd.backward([out, lse], [dout, torch.where(lse.isinf(), 0.0, dlse)])
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad, sinks.grad)]


def masks_equal_one_process():
    count = 0
    for options in MASKS:
        given = tensors(TOKENS, seed=3)
        sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
        *expected, dsinks = attend(encke.attention, given, sinks, **options)
        for cut in cuts(options):
            kind = cut.get("sharding", "contiguous")
            mine = [ring.shard(x, **cut) for x in given]
            sizes = cut.get("sizes") if count % 2 else None
            *got, share = attend(
                ring.ring_attention, mine, sinks, sharding=kind, sizes=sizes, **options
            )
            compare(got, expected, cut, 1e-12, (options, cut))
            dist.all_reduce(share)
            assert torch.allclose(share, dsinks, rtol=1e-12, atol=1e-12), (options, cut)
            count += 1
    return count


def values_of_another_width():
    """Outputs as wide as the values."""
    given = tensors(TOKENS, seed=4)
    v, dout = (torch.cat([x, x.flip(1)[..., :3]], -1) for x in (given[2], given[3]))
    given = [*given[:2], v, dout, given[4]]
    sinks = torch.zeros(4, dtype=torch.float64)
    *expected, _ = attend(encke.attention, given, sinks, causal=True)
    for cut in (dict(), dict(sharding="zigzag"), dict(sharding="striped")):
        mine = [ring.shard(x, **cut) for x in given]
        *got, _ = attend(ring.ring_attention, mine, sinks, causal=True, **cut)
        compare(got, expected, cut, 1e-12, cut)


def fewer_queries_equal_one_process():
    """Queries on the ranks of the tokens at their positions; some ranks have none."""
    count = 0
    for options, queries in (
        (dict(causal=True), 5),
        (dict(window=(9, 2), query_offset=11), 17),
        (dict(causal=True, documents=DOCUMENTS, query_offset=6), 33),
        (dict(GROUP, causal=True, dropout=0.3, seed=5), 41),
    ):
        offset = options.get("query_offset")
        first = TOKENS - queries if offset is None else offset
        q, k, v, dout, dlse = tensors(TOKENS, seed=8)
        q, dout, dlse = (x[:, :queries] for x in (q, dout, dlse))
        sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
        *expected, dsinks = attend(encke.attention, (q, k, v, dout, dlse), sinks, **options)
        of_mask = {name: x for name, x in options.items() if name != "query_offset"}
        for cut in cuts(of_mask):
            kind = cut.get("sharding", "contiguous")
            of_queries = dict(cut, tokens=TOKENS, query_offset=offset)
            mine = [ring.shard(q, **of_queries), *(ring.shard(x, **cut) for x in (k, v))]
            mine += [ring.shard(x, **of_queries) for x in (dout, dlse)]
            given = dict(options, sharding=kind)
            if count % 2:
                sizes = cut.get("sizes") or ring.sizes_of(TOKENS, **cut)
                given.update(sizes=sizes, query_tokens=queries)
            *got, share = attend(ring.ring_attention, mine, sinks, **given)
            for own, of in zip(got[:3], expected[:3]):
                assert torch.allclose(own, ring.shard(of, **of_queries), atol=1e-12), (options, cut)
            for own, of in zip(got[3:], expected[3:]):
                assert torch.allclose(own, ring.shard(of, **cut), atol=1e-12), (options, cut)
            dist.all_reduce(share)
            assert torch.allclose(share, dsinks, rtol=1e-12, atol=1e-12), (options, cut)
            gathered = ring.unshard(
                got[0],
                sharding=kind,
                tokens=TOKENS,
                query_offset=offset,
                documents=cut.get("documents"),
            )
            assert torch.allclose(gathered, expected[0], atol=1e-12), (options, cut)
            rows = ring.shard(torch.arange(first, first + queries), dim=0, **of_queries)
            assert len(rows) == mine[0].shape[1]
            asked = dict(cut, query_tokens=queries, query_offset=offset)
            where = ring.positions(TOKENS, **asked)
            if cut.get("documents") is not None:
                lengths = ring.document_lengths(asked.pop("documents"), **asked)
                assert sum(lengths) == len(rows), (options, cut)
                alone = torch.cat([torch.arange(length) for length in DOCUMENTS])
                rows = alone[rows]
            assert torch.equal(where, rows), (options, cut)
            count += 1
    last = dist.get_rank() == dist.get_world_size() - 1
    q, k = torch.randn(1, 3 if last else 2, 4, 8), torch.randn(1, 4, 4, 8)
    message = raised(ValueError, lambda: ring.ring_attention(q, k, k))
    assert "queries, but the" in message and "encke.distributed.shard" in message, message
    sizes = [4] * dist.get_world_size()
    q = torch.randn(1, 4 if last else 0, 4, 8)
    message = raised(ValueError, lambda: ring.ring_attention(q, k, k, sizes=sizes, query_tokens=7))
    assert "query_tokens is 7, but the ranks have 4" in message, message
    return count


def packings_are_forgotten():
    """Rings of packed documents do not accumulate, and forgotten ones are agreed on again."""
    from encke import _agreed, _wire

    sizes = ring.sizes_of(40)
    q = ring.shard(tensors(40)[0])
    for length in [*range(1, 30), 1, 2]:
        out = ring.ring_attention(q, q, q, documents=[length, 40 - length], sizes=sizes)
    assert len(_wire.wire_of(None).agreed._packed) <= _agreed._MAX_PACKED
    whole = tensors(40)[0]
    expected = encke.attention(whole, whole, whole, documents=[2, 38])
    assert torch.allclose(out, ring.shard(expected), atol=1e-12)


def positions_and_documents():
    """Rotary embeddings by the positions of a rank are those of the whole sequence."""
    ranks = dist.get_world_size()
    for options in (dict(causal=True), dict(causal=True, documents=DOCUMENTS)):
        documents = options.get("documents")
        for cut in cuts(options):
            mine = dict(cut, documents=documents) if documents else cut
            own = ring.positions(TOKENS, **mine)
            rows = ring.shard(torch.arange(TOKENS), dim=0, **cut)
            assert own.shape == rows.shape
            if documents is None:
                assert torch.equal(own, rows)
                continue
            alone = torch.cat([torch.arange(length) for length in documents])
            assert torch.equal(own, alone[rows]), cut
            of_rank = {name: x for name, x in cut.items() if name != "documents"}
            lengths = ring.document_lengths(documents, **of_rank)
            assert sum(lengths) == len(own) and len(lengths) == len(documents)
            for part in own.split(lengths):
                assert (part.diff() > 0).all()
            every = torch.tensor(lengths)
            dist.all_reduce(every)
            assert every.tolist() == documents
    sizes = ring.sizes_of(TOKENS, sharding="balanced", causal=True)
    assert sum(sizes) == TOKENS and len(sizes) == ranks and sizes[0] > sizes[-1]


def masks_that_are_refused():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = rank == ranks - 1
    q = torch.randn(1, 6, 4, 8)
    for options, word in (
        (dict(window=(3 + last, 0)), "window"),
        (dict(documents=[6 * ranks - 1, 1] if last else [6 * ranks]), "documents"),
        (dict(sinks=torch.zeros(4) if last else None), "sinks"),
        (dict(alibi_slopes=[float(last)] * 4), "alibi_slopes"),
        (dict(dropout=0.1, seed=int(last)), "seed"),
    ):
        message = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, **options))
        assert word in message and "rank 0" in message, message
    # An invalid rank raises its own error, the others name that rank.
    window = (-1 if last else 1, 0)
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, window=window))
    assert "window is (-1, 0)" in message and (last or f"rank {ranks - 1}" in message), message
    sinks = torch.zeros(3 if last else 4)
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, sinks=sinks))
    assert "sinks has shape [3], expected [4]" in message, message
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, dropout=0.1))
    assert "dropout is 0.1, and needs a seed" in message, message
    # An invalid request raises the same error on all ranks.
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, documents=[5]))
    assert "documents have 5 tokens together" in message and f"{6 * ranks}" in message, message
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, softcap=0.0))
    assert "softcap is 0" in message, message
    assert ring.ring_attention(q, q, q).shape == q.shape


def masks_in_a_graph():
    """Sinks, packings and slopes are tensors of one graph, without a graph break."""
    if dist.get_world_size() != 2:
        return "skipped: with 2 processes"
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v, sinks, return_lse, cu_seqlens, slopes, seed):
        return ring.ring_attention(
            q * 2,
            k,
            v,
            sinks=sinks,
            cu_seqlens=cu_seqlens,
            alibi_slopes=slopes,
            causal=True,
            window=(9, 0),
            softcap=3.0,
            dropout=0.2,
            seed=seed,
            return_lse=return_lse,
        )

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    given = [ring.shard(x) for x in tensors(20, dtype=torch.float32)]
    assert given[-1].dtype == sums(torch.float32)
    for bounds in ([0, 5, 20], [0, 11, 20]):
        masks = dict(cu_seqlens=torch.tensor(bounds), slopes=torch.tensor([0.5, 0.2, 0.1, 0.0]))
        masks["seed"] = torch.tensor(bounds[1])
        eager, graph = (attend(function, given, sinks, **masks) for function in (layer, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, graph)), bounds
    assert len(graphs) == 1, len(graphs)
    aot = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    again = attend(aot, given, sinks, **masks)
    assert all(torch.equal(a, b) for a, b in zip(eager, again))
    torch._dynamo.reset()
    return None


CASES = [
    masks_equal_one_process,
    values_of_another_width,
    fewer_queries_equal_one_process,
    packings_are_forgotten,
    positions_and_documents,
    masks_that_are_refused,
    masks_in_a_graph,
]
