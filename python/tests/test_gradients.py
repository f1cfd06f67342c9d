"""Gradients: finite differences, torch's own, through the lse, and autograd's rules."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

import encke
import oracle

MIX = dict(segment_lengths=[4, 12], dilation_rates=[1, 3], mode="mix")
GROUP = dict(segment_lengths=[4, 12], dilation_rates=[1, 3])


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(MIX, causal=True),
        dict(GROUP),
        dict(causal=True, ranks=2, sharding="zigzag"),
        dict(MIX, ranks=3, queries="replicated"),
        dict(causal=True, checkpoint="recompute"),
        dict(MIX, ranks=3, redundancy=1),
    ],
    ids=str,
)
def test_gradcheck(randn, options):
    q = randn(1, 12, 2, 3, requires_grad=True)
    k, v = (randn(1, 12, 1, 3, requires_grad=True) for _ in range(2))
    _, lse = encke.attention(q, k, v, **options, return_lse=True)
    seen = lse.detach().isfinite()

    def call(q, k, v):
        out, lse = encke.attention(q, k, v, **options, return_lse=True)
        return out, lse[seen]

    assert gradcheck(call, (q, k, v), fast_mode=False)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [dict(causal=True), dict(MIX, causal=True), GROUP], ids=str)
def test_gradients_equal_those_of_torch_attention(randn, options, ranks):
    q = randn(2, 30, 4, 8, requires_grad=True)
    k, v = (randn(2, 30, 2, 8, requires_grad=True) for _ in range(2))
    dout = randn(2, 30, 4, 8)
    out, lse = encke.attention(q, k, v, **options, ranks=ranks, return_lse=True)
    expected_out, expected_lse = oracle.attention(q, k, v, **options)
    finite = expected_lse.isfinite()
    dlse = randn(2, 30, 4)

    def gradients(out, lse):
        loss = (out * dout).sum() + (lse[finite] * dlse[finite]).sum()
        return torch.autograd.grad(loss, (q, k, v))

    expected = gradients(expected_out, expected_lse)
    for got, wanted in zip(gradients(out, lse), expected):
        assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_gradients_of_detached_mixing_are_those_of_constant_weights(randn):
    """With constant mixing weights each branch is attention by itself, weighted by its lse."""
    options = dict(MIX, offsets="head-mod")
    q, k, v = (randn(1, 24, 2, 4, requires_grad=True) for _ in range(3))
    dout = randn(1, 24, 2, 4)
    parts = []
    for w, r in zip(options["segment_lengths"], options["dilation_rates"]):
        alone = dict(segment_lengths=[w], dilation_rates=[r], mode="mix")
        parts.append(oracle.attention(q, k, v, **alone))
    weights = torch.stack([lse for _, lse in parts]).detach().softmax(0)
    weights = weights.nan_to_num(0.0)
    mixed = sum(w[..., None] * out for w, (out, _) in zip(weights, parts))
    out = encke.attention(q, k, v, **options, mixing_gradient="detached")
    assert_close(out, mixed, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(mixed, (q, k, v), dout)
    for got, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), expected):
        assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_a_gradient_with_stride_zero(randn):
    q, k, v = (randn(1, 12, 2, 4, requires_grad=True) for _ in range(3))
    encke.attention(q, k, v).sum().backward()
    assert_close(v.grad.sum(), torch.tensor(12.0 * 2 * 4, dtype=torch.float64))


def test_only_needed_gradients_are_returned(randn):
    q, k, v = randn(1, 8, 2, 4), randn(1, 8, 2, 4, requires_grad=True), randn(1, 8, 2, 4)
    encke.attention(q, k, v).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_the_lse_alone_has_a_gradient(randn):
    q, k, v = (randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    _, lse = encke.attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    _, expected = oracle.attention(q, k, v)
    wanted = torch.autograd.grad(expected.sum(), (q, k), retain_graph=True)
    assert_close(got[0], wanted[0])
    assert_close(got[1], wanted[1])
    assert (got[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_in_low_precision(randn, dtype):
    wide = [randn(1, 64, 4, 32) for _ in range(3)]
    dout = randn(1, 64, 4, 32).to(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in wide)
    encke.attention(q, k, v, causal=True).backward(dout)
    exact = [x.to(dtype).double().requires_grad_() for x in wide]
    oracle.attention(*exact, causal=True)[0].backward(dout.double())
    for got, wanted in zip((q, k, v), exact):
        assert got.grad.dtype == dtype
        size = wanted.grad.abs().max()
        off = (got.grad.double() - wanted.grad).abs().max()
        assert off <= 4 * torch.finfo(dtype).eps * size


def test_with_another_precision_gradients_have_the_input_dtype(randn):
    q, k, v = (randn(1, 16, 2, 8).float().requires_grad_() for _ in range(3))
    out = encke.attention(q, k, v, precision="float64")
    out.backward(torch.ones_like(out))
    assert q.grad.dtype == torch.float32


def test_second_order_gradients_are_refused(randn):
    q, k, v = (randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(encke.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first order only"):
        dq.sum().backward()


def test_in_place_changes_of_saved_tensors_are_detected(randn):
    q, k, v = (randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    out = encke.attention(q, k, v)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inputs_out_and_lse_are_saved(randn):
    q, k, v = (randn(1, 16, 2, 4, requires_grad=True) for _ in range(3))
    kept = []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, lse = encke.attention(q, k, v, causal=True, return_lse=True)
    assert kept == [x.data_ptr() for x in (q, k, v, out, lse)]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encke.attention(q, k, v, causal=True, checkpoint="recompute")
    assert kept == [x.data_ptr() for x in (q, k, v)]


def test_torch_checkpointing(randn):
    q, k, v = (randn(1, 16, 2, 4, requires_grad=True) for _ in range(3))

    def layer(q, k, v):
        return encke.attention(q, k, v, causal=True).square()

    plain = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.sum(), (q, k, v))):
        assert torch.equal(a, b)
