"""Fewer queries than keys: the last tokens, or those from an offset on."""

import numpy
import pytest
import torch

import encke
import oracle
from test_masks import DOCUMENTS, GROUP, MIX, TOKENS, compare, refused

OPTIONS = {
    "dense": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(6, 0), prefix=2),
    "two-sided": dict(window=(4, 3)),
    "documents": dict(causal=True, documents=DOCUMENTS),
    "mix": dict(MIX, causal=True),
    "group": dict(GROUP, window=(9, 2)),
    "scores": dict(softcap=2.0, alibi_slopes=True, causal=True),
    "recompute": dict(causal=True, checkpoint="recompute"),
}
RINGS = [
    {},
    dict(ranks=3),
    dict(ranks=4, sharding="zigzag"),
    dict(ranks=2, sharding="striped"),
    dict(ranks=3, sharding="balanced"),
    dict(sharding=[0, 5, 5, 30]),
    dict(ranks=3, queries="replicated"),
    dict(ranks=3, redundancy=1),
]


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("queries", "offset"), [(7, None), (1, None), (9, 0), (12, 17)])
def test_fewer_queries_equal_dense_attention(randn, options, ring, queries, offset):
    q = randn(2, queries, 4, 8, requires_grad=True)
    k, v = (randn(2, TOKENS, 2, 8, requires_grad=True) for _ in range(2))
    sinks = randn(4, requires_grad=True)
    options = dict(options, sinks=sinks, query_offset=offset)
    expected = {name: x for name, x in options.items() if name != "checkpoint"}
    compare(
        lambda: encke.attention(q, k, v, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, **expected),
        (q, k, v, sinks),
        randn,
    )


def test_a_decoding_step_equals_the_last_row(randn):
    q, k, v = (randn(1, TOKENS, 4, 8) for _ in range(3))
    whole = encke.attention(q, k, v, causal=True)
    last = encke.attention(q[:, -1:], k, v, causal=True)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-12, atol=1e-12)


def test_numpy_arrays(randn):
    q, dout = randn(2, 7, 4, 8), randn(2, 7, 4, 8)
    k, v = (randn(2, TOKENS, 2, 8) for _ in range(2))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    options = dict(causal=True, query_offset=11)
    out = encke.attention(*inputs, **options)
    expected = torch.autograd.grad(out, inputs, dout)
    arrays = [x.numpy() for x in (q, k, v)]
    assert numpy.array_equal(encke.attention(*arrays, **options), out.detach().numpy())
    got = encke.attention_backward(*arrays, dout.numpy(), **options)
    assert all(numpy.array_equal(a, b.numpy()) for a, b in zip(got, expected))


def test_in_a_whole_graph(randn):
    def layer(q, k, v):
        out, lse = encke.attention(q * 2, k, v, causal=True, query_offset=3, return_lse=True)
        return out.sin().sum() + lse.sum()

    given = [randn(1, n, 2, 4, requires_grad=True) for n in (5, 12, 12)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(*given), given)
    for got, wanted in zip(torch.autograd.grad(compiled(*given), given), expected):
        assert torch.equal(got, wanted)


def test_errors_name_the_number():
    q, k, v = torch.zeros(1, 4, 2, 8), torch.zeros(1, 16, 2, 8), torch.zeros(1, 16, 2, 8)
    refused(ValueError, "query_offset is -1", q, k, v, query_offset=-1)
    refused(ValueError, "4 queries from position 13.*16 .*at most 12", q, k, v, query_offset=13)
    refused(ValueError, "16 queries from position 1 ", k, k, v, query_offset=1)
    refused(ValueError, "with key_lengths both", q, k, v, key_lengths=[4])
