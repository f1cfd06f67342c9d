"""NumPy: the same results as torch, writable arrays, and gradients by a function."""

import numpy
import pytest
import torch

import encke


def arrays(count=3, shape=(1, 24, 4, 8), dtype=numpy.float64):
    rng = numpy.random.default_rng(7)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32, numpy.float16])
def test_the_same_bits_as_torch(dtype):
    q, k, v = arrays(dtype=dtype)
    out, lse = encke.attention(q, k, v, causal=True, ranks=2, return_lse=True)
    theirs = encke.attention(
        *map(torch.from_numpy, (q, k, v)), causal=True, ranks=2, return_lse=True
    )
    assert out.dtype == dtype and out.shape == q.shape
    assert lse.dtype == (numpy.float64 if dtype == numpy.float64 else numpy.float32)
    assert (out == theirs[0].numpy()).all() and (lse == theirs[1].numpy()).all()


def test_results_are_writable_and_outlive_the_call():
    q, k, v = arrays()
    out = encke.attention(q, k, v)
    expected = out.copy()
    for _ in range(20):
        encke.attention(q, k, v)
    assert (out == expected).all()
    out += 1
    assert (out == expected + 1).all()


def test_strided_arrays_and_arrays_that_are_read_only():
    q, k, v = arrays(shape=(1, 4, 24, 8))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k.flags.writeable = False
    got = encke.attention(q, k, v)
    assert (got == encke.attention(*(numpy.ascontiguousarray(x) for x in (q, k, v)))).all()


@pytest.mark.parametrize(
    "mode", [dict(), dict(mode="mix"), dict(mode="mix", mixing_gradient="detached")]
)
def test_gradients_equal_those_of_autograd(mode):
    options = dict(mode, segment_lengths=[8, 24], dilation_rates=[1, 2], causal=True)
    q, k, v, dout = arrays(4)
    out, lse = encke.attention(q, k, v, **options, return_lse=True)
    kept = encke.attention_backward(q, k, v, dout, out=out, lse=lse, **options)
    again = encke.attention_backward(q, k, v, dout, **options)
    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    expected = torch.autograd.grad(encke.attention(*inputs, **options), inputs, torch.tensor(dout))
    for a, b, c in zip(kept, again, expected):
        assert (a == b).all() and (a == c.numpy()).all()


def test_numpy_has_no_bfloat16():
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        encke.attention(*arrays(), precision="bf16")
