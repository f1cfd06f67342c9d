"""encke.scaled_dot_product_attention beside torch's."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import encke

CLOSE = dict(rtol=1e-10, atol=1e-10)


def check(q, k, v, randn, **options):
    """Equal outputs and gradients."""
    given = [x.requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*given, **options)
    found = encke.scaled_dot_product_attention(*given, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, **CLOSE)
    if expected.numel():
        dout = randn(*expected.shape)
        wanted = torch.autograd.grad(expected, given, dout)
        for got, want in zip(torch.autograd.grad(found, given, dout), wanted):
            torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("lead", [(2, 3), (3,), (2, 1, 3), ()], ids=str)
def test_shapes(randn, lead, queries, keys, is_causal):
    q, k, v = randn(*lead, queries, 8), randn(*lead, keys, 8), randn(*lead, keys, 6)
    check(q, k, v, randn, is_causal=is_causal)


def test_grouped_heads_and_scale(randn):
    q, k, v = randn(2, 6, 9, 8), randn(2, 3, 9, 8), randn(2, 3, 9, 8)
    check(q, k, v, randn, enable_gqa=True, scale=0.3, is_causal=True)
    with pytest.raises(ValueError, match="are 6, 3 and 3; give enable_gqa"):
        encke.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("heads", "enable_gqa"),
    [
        ((1, 3, 3), False),
        ((3, 1, 1), False),
        ((1, 1, 3), False),
        ((4, 1, 4), False),
        ((6, 3, 2), True),
        ((4, 4, 2), True),
    ],
)
def test_heads_that_torch_shares(randn, heads, enable_gqa):
    q, k, v = (randn(2, of, tokens, 8) for of, tokens in zip(heads, (5, 9, 9)))
    check(q, k, v, randn, enable_gqa=enable_gqa)


@pytest.mark.parametrize("heads", [(3, 2, 2), (1, 2, 2), (4, 2, 3)])
def test_heads_that_cannot_be_grouped_are_refused(randn, heads):
    q, k, v = (randn(2, of, 5, 8) for of in heads)
    words = f"are {heads[0]}, {heads[1]} and {heads[2]}; with enable_gqa"
    with pytest.raises(ValueError, match=words):
        encke.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_batches_are_broadcast(randn):
    check(randn(1, 3, 5, 8), randn(2, 3, 9, 8), randn(2, 3, 9, 8), randn)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_that_are_patterns(randn, kind):
    q, k, v = randn(2, 3, 9, 8), randn(2, 3, 9, 8), randn(2, 3, 9, 8)
    query, key = torch.arange(9)[:, None], torch.arange(9)
    mask = (key <= query) & (query - key < 4)
    if kind == "float":
        mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    check(q, k, v, randn, attn_mask=mask)


def test_other_masks_are_refused(randn):
    q = randn(1, 2, 4, 8)
    with pytest.raises(encke.MaskError, match="other numbers"):
        encke.scaled_dot_product_attention(q, q, q, attn_mask=randn(4, 4))
    strange = torch.eye(4, dtype=torch.bool)
    strange[0, 3] = True
    with pytest.raises(encke.MaskError):
        encke.scaled_dot_product_attention(q, q, q, attn_mask=strange)
    with pytest.raises(ValueError, match="both given"):
        encke.scaled_dot_product_attention(q, q, q, attn_mask=strange, is_causal=True)
