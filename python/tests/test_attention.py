"""Results against torch's own attention, for every pattern, sharding, dtype and layout."""

import math

import pytest
import torch
from torch.testing import assert_close

import encke
import oracle

EXACT = dict(rtol=1e-12, atol=1e-12)
MIX = dict(segment_lengths=[8, 24], dilation_rates=[1, 3], mode="mix")
GROUP = dict(segment_lengths=[6, 20, 37], dilation_rates=[1, 2, 5])
PATTERNS = {
    "dense": {},
    "causal": dict(causal=True),
    "scaled": dict(scale=0.7),
    "mix": MIX,
    "mix causal": dict(MIX, causal=True),
    "mix by blocks": dict(MIX, offsets="head-block"),
    "group": GROUP,
    "group causal": dict(GROUP, causal=True),
}
RINGS = [
    {},
    dict(ranks=3),
    dict(ranks=4, sharding="zigzag"),
    dict(ranks=2, sharding="striped"),
    dict(sharding=[0, 5, 5, 30]),
    dict(ranks=3, queries="replicated"),
    dict(ranks=3, redundancy=1),
]


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern_on_every_ring_equals_torch_attention(randn, pattern, ring):
    q, k, v = randn(2, 37, 4, 8), randn(2, 37, 2, 8), randn(2, 37, 2, 8)
    out, lse = encke.attention(q, k, v, **pattern, **ring, return_lse=True)
    expected_out, expected_lse = oracle.attention(q, k, v, **pattern)
    assert_close(out, expected_out, **EXACT)
    assert_close(lse, expected_lse, **EXACT)


def test_lse_is_returned_only_with_return_lse(randn):
    q, k, v = (randn(1, 8, 2, 4) for _ in range(3))
    out = encke.attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    assert out.is_contiguous() and out.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_accurate_as_torch(randn, dtype):
    q, k, v = (randn(2, 100, 4, 64).to(dtype) for _ in range(3))
    out, lse = encke.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, exact_lse = oracle.attention(q.double(), k.double(), v.double(), causal=True)
    theirs, _ = oracle.attention(q, k, v, causal=True)
    floor = torch.finfo(dtype).eps
    own, other = ((x.double() - exact).abs().max() for x in (out, theirs))
    assert own <= 2 * other + floor
    assert (lse - exact_lse).abs().max() < 1e-4


def test_precision_is_the_output_dtype(randn):
    q, k, v = (randn(1, 40, 2, 16).float() for _ in range(3))
    wide, _ = oracle.attention(q.double(), k.double(), v.double())
    for name in ("f64", "float64", torch.float64):
        out = encke.attention(q, k, v, precision=name)
        assert out.dtype == torch.float64
        assert_close(out, wide, **EXACT)
    assert encke.attention(q, k, v, precision="bf16").dtype == torch.bfloat16


def views(randn):
    """Tensors of one shape with different strides."""
    yield randn(2, 12, 4, 8)
    yield randn(2, 4, 12, 8).transpose(1, 2)
    yield randn(2, 12, 3, 4, 8)[:, :, 1]
    yield randn(2, 24, 4, 8)[:, ::2]
    yield randn(2, 12, 4, 16)[..., :8]
    yield randn(1, 12, 4, 8).expand(2, 12, 4, 8)
    yield randn(2, 12, 1, 8).expand(2, 12, 4, 8)


def test_all_strides_give_the_same_bits(randn):
    k, v = randn(2, 12, 4, 8), randn(2, 12, 4, 8)
    for q in views(randn):
        assert q.shape == (2, 12, 4, 8)
        for ring in ({}, dict(ranks=3)):
            got = encke.attention(q, k, v, **ring)
            assert torch.equal(got, encke.attention(q.contiguous(), k, v, **ring)), q.stride()
            swapped = encke.attention(v, q, k, **ring)
            assert torch.equal(swapped, encke.attention(v, q.contiguous(), k, **ring)), q.stride()


def test_every_call_gives_the_same_bits(randn):
    q, k, v = (randn(1, 64, 4, 16).float() for _ in range(3))
    first = encke.attention(q, k, v, **MIX, ranks=3)
    assert all(torch.equal(first, encke.attention(q, k, v, **MIX, ranks=3)) for _ in range(5))


def test_a_query_without_keys_has_zeros_and_lse_minus_infinity(randn):
    q, k, v = (randn(1, 8, 1, 4) for _ in range(3))
    out, lse = encke.attention(q, k, v, segment_lengths=[4], dilation_rates=[2], return_lse=True)
    assert (out[0, 1::2] == 0).all() and (lse[0, 1::2] == -math.inf).all()
    assert lse[0, ::2].isfinite().all()


def test_parameters_and_tensors_without_gradients(randn):
    q = torch.nn.Parameter(randn(1, 8, 2, 4))
    with torch.no_grad():
        assert not encke.attention(q, q, q).requires_grad
    assert encke.attention(q, q, q).requires_grad


def test_concurrent_calls(randn):
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (randn(1, 200, 4, 16) for _ in range(3))
    expected = encke.attention(q, k, v, causal=True)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(encke.attention, q, k, v, causal=True) for _ in range(16)]
        assert all(torch.equal(call.result(), expected) for call in calls)
