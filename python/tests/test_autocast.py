"""Under autocast attention is computed in the autocast dtype, as torch's own is."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import encke


def test_inputs_are_cast_as_for_torch_attention(randn):
    q, k, v = (randn(1, 16, 2, 8).float().requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = encke.attention(q, k, v)
        theirs = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(out, encke.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_mixed_dtypes_are_cast_to_one(randn):
    q, k, v = randn(1, 16, 2, 8).float(), randn(1, 16, 2, 8).bfloat16(), randn(1, 16, 2, 8).half()
    with torch.autocast("cpu", torch.float16):
        assert encke.attention(q, k, v).dtype == torch.float16


def test_float64_is_not_cast(randn):
    q, k, v = (randn(1, 16, 2, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert encke.attention(q, k, v).dtype == torch.float64


def test_nothing_is_cast_with_autocast_disabled(randn):
    q, k, v = (randn(1, 16, 2, 8).float() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert encke.attention(q, k, v).dtype == torch.float32
