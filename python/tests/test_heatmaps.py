"""Rows and column sums of the softmax: the output where the values are unit vectors."""

import pytest
import torch

import encke

TOKENS, HEADS = 40, 4
MIX = dict(segment_lengths=[8, 16, 40], dilation_rates=[1, 2, 4], mode="mix")
OPTIONS = [
    {},
    dict(causal=True, scale=0.3),
    MIX,
    dict(MIX, offsets="head-block", mixing_gradient="detached", padding="torchscale"),
    dict(segment_lengths=[16, 40], dilation_rates=[1, 3], group_scale="groups"),
    dict(window=(5, 2), prefix=3, softcap=1.5, alibi_slopes=True),
    dict(documents=[11, 29], causal=True, alibi_slopes=[0.1, 0.2, 0.3, 0.0]),
    dict(sinks=[0.1, 2.0, -1.0, 0.0], window=(9, 0)),
]


def probabilities(q, k, options):
    """All rows, [batch, queries, heads, tokens], and the lse."""
    units = torch.eye(TOKENS, dtype=q.dtype).expand(q.shape[0], k.shape[2], -1, -1)
    v = units.transpose(1, 2).contiguous()
    out, lse = encke.attention(q, k, v, **options, return_lse=True)
    return (2 * out if options.get("group_scale") else out), lse


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_and_columns_are_those_of_the_softmax(options, randn):
    q, k = randn(2, TOKENS, HEADS, 8), randn(2, TOKENS, 2, 8)
    expected, lse = probabilities(q, k, options)
    of_softmax = {name: value for name, value in options.items() if name != "sinks"}
    rows = encke.attention_rows(q, k, lse, range(TOKENS), **of_softmax)
    assert torch.allclose(rows, expected, atol=1e-12, rtol=0)
    columns = encke.attention_columns(q, k, lse, **of_softmax)
    assert torch.allclose(columns, expected.sum(1), atol=1e-11, rtol=0)
    few = encke.attention_rows(q.numpy(), k.numpy(), lse.numpy(), [7, 0], **of_softmax)
    assert torch.allclose(torch.from_numpy(few), expected[:, [7, 0]], atol=1e-12, rtol=0)


def test_fewer_queries_than_keys(randn):
    q, k = randn(1, 5, HEADS, 8), randn(1, TOKENS, HEADS, 8)
    options = dict(causal=True, query_offset=12)
    expected, lse = probabilities(q, k, options)
    rows = encke.attention_rows(q, k, lse, [4], **options)
    assert torch.allclose(rows, expected[:, 4:], atol=1e-12, rtol=0)


def test_half_precision_gives_float32(randn):
    q, k = (randn(1, TOKENS, HEADS, 8, dtype=torch.float16) for _ in range(2))
    _, lse = encke.attention(q, k, k, return_lse=True)
    rows, columns = encke.attention_rows(q, k, lse, [3]), encke.attention_columns(q, k, lse)
    assert rows.dtype == columns.dtype == torch.float32
    assert torch.allclose(rows.sum(-1), torch.ones(()), atol=2e-3)
    assert torch.allclose(columns.sum(-1), torch.tensor(float(TOKENS)), atol=0.1)


def test_rows_that_are_not_there_are_refused(randn):
    q = randn(1, TOKENS, HEADS, 8)
    _, lse = encke.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match=r"rows\[1\] is 40, but there are 40 queries"):
        encke.attention_rows(q, q, lse, [0, 40])
    with pytest.raises(ValueError, match="fkodom"):
        encke.attention_columns(q, q, lse, mode="fkodom")
