"""Torchscale's padding and detached mixing weights on a GPU equal those on the CPU."""

import pytest
import torch

import encke
from encke.compat._misplaced import with_misplaced_rows
from test_golden import TORCHSCALE
from test_torchscale import BRANCHES, DilatedAttention, by_definition, gradients
from test_torchscale import compat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

CASES = {
    "torchscale": TORCHSCALE,
    "exact": dict(TORCHSCALE, mixing_gradient="exact"),
    "without padding": dict(TORCHSCALE, padding=None),
    "causal": dict(TORCHSCALE, causal=True),
}


def attend(tensors, dout, dlse, function=encke.attention, **options):
    """out, lse and gradients."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*inputs, **BRANCHES, **options, return_lse=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    return [out, lse, *(x.grad for x in inputs)]


@pytest.mark.parametrize("ring", [{}, dict(ranks=3), dict(ranks=2, sharding="zigzag")], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_gpu_equals_the_cpu(options, ring, randn):
    given = [randn(2, 53, 16, 8) for _ in range(3)]
    dout, dlse = randn(2, 53, 16, 8), randn(2, 53, 16)
    expected = attend(given, dout, dlse, **options)
    got = attend([x.cuda() for x in given], dout.cuda(), dlse.cuda(), **options, **ring)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        assert a.is_cuda
        assert torch.allclose(a.cpu(), b, atol=1e-11, rtol=1e-11), name


MASKS = {
    "documents": dict(documents=[20, 33]),
    "a window": dict(window=(9, 4), padding=None),
    "offsets by remainder": dict(padding=None, offsets="head-mod"),
    "one branch": dict(segment_lengths=[22], dilation_rates=[2]),
    "no branch with rate 1": dict(segment_lengths=[22, 64], dilation_rates=[2, 4]),
}


@pytest.mark.parametrize("dim", [8, 5], ids="{} wide".format)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_detached_weights_with_masks(mask, dim, randn):
    """In one backward pass for all branches; rows of 5 elements are no vectors of 16 bytes."""
    given = [randn(1, 53, 16, dim) for _ in range(3)]
    dout, dlse = randn(1, 53, 16, dim), randn(1, 53, 16)
    options = {**BRANCHES, **TORCHSCALE, **mask}
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).clone().requires_grad_() for x in given]
        out, lse = encke.attention(*inputs, **options, return_lse=True)
        upstream = [x.to(device) for x in (dout, dlse)]
        torch.autograd.backward([out, lse], upstream)
        results.append([x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))])
    for name, b, a in zip(("out", "lse", "dq", "dk", "dv"), *results):
        assert torch.allclose(a, b, atol=1e-11, rtol=1e-11), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_branch_without_weight_has_a_small_gradient_and_no_nan(dtype, randn):
    """The delta of the branch with most pairs is what the others leave: here nothing or little."""
    q, k, v, dout = (randn(1, 64, 2, 8).to(dtype) for _ in range(4))
    options = dict(
        segment_lengths=[64, 8], dilation_rates=[1, 1], mode="mix", mixing_gradient="detached"
    )
    blocks = torch.nn.functional.one_hot(torch.arange(64) // 8).to(dtype).view(1, 64, 1, 8)
    for score in (0.0, 20.0, 300.0):
        # So much more do keys of a query's own segment of 8 have.
        ahead = blocks * (score * 8**0.5) ** 0.5
        inputs = [q + ahead, k + ahead, v]
        expected = attend_on("cpu", inputs, dout, options, torch.float64)
        got = attend_on("cuda", inputs, dout, options, dtype)
        for name, a, b in zip(("dq", "dk", "dv"), got, expected):
            bound = (1e-11 if dtype == torch.float64 else 1e-4) * b.norm()
            assert (a - b).norm() <= bound, (name, score)


def attend_on(device, inputs, dout, options, dtype):
    """The gradients, as float64 on the host."""
    own = [x.to(device, dtype).requires_grad_() for x in inputs]
    out = encke.attention(*own, **options)
    return [x.cpu().double() for x in torch.autograd.grad(out, own, dout.to(device, dtype))]


@pytest.mark.parametrize("dim", [24, 48, 64, 96])
def test_half_precision(dim, randn):
    given = [randn(1, 1500, 16, dim).half() for _ in range(3)]
    dout = randn(1, 1500, 16, dim).half()
    dlse = torch.zeros(1, 1500, 16)
    expected = attend([x.double() for x in given], dout.double(), dlse.double(), **TORCHSCALE)
    got = attend([x.cuda() for x in given], dout.cuda(), dlse.cuda(), **TORCHSCALE)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        assert (a.cpu() - b).norm() <= 3e-3 * b.norm(), name


def test_large_scores_have_no_nan(randn):
    q, k, v = (60 * randn(1, 300, 16, 48) for _ in range(3))
    halves = [x.half().cuda().requires_grad_() for x in (q, k, v)]
    out = encke.attention(*halves, **BRANCHES, **TORCHSCALE)
    out.sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in halves)


def test_a_patched_module_and_misplaced_rows(randn):
    module = DilatedAttention().double().cuda()
    compat.patch(module)
    x = randn(1, 53, 64).cuda().requires_grad_()
    out = module(x, x, x)[0]
    host = DilatedAttention().double()
    host.load_state_dict(module.state_dict())
    x_host = x.detach().cpu().requires_grad_()
    expected = by_definition(host, x_host)
    assert torch.allclose(out.cpu(), expected, atol=1e-11)
    ours = gradients(module, out.cpu(), x)
    for a, b in zip(ours, gradients(host, expected, x_host)):
        assert torch.allclose(a.cpu(), b, atol=1e-10)
    q = randn(1, 61, 16, 8)
    branches = dict(segment_lengths=(8, 22, 30, 64), dilation_rates=(1, 2, 4, 8))
    a, b = (with_misplaced_rows(x, x, x, **branches, **TORCHSCALE) for x in (q, q.cuda()))
    assert torch.allclose(a, b.cpu(), atol=1e-11)


def test_rows_and_columns(randn):
    q, k, v = (randn(1, 53, 16, 8) for _ in range(3))
    _, lse = encke.attention(q, k, v, **BRANCHES, **TORCHSCALE, return_lse=True)
    on_gpu = [x.cuda() for x in (q, k, lse)]
    for function, rest in ((encke.attention_rows, ([0, 7],)), (encke.attention_columns, ())):
        expected = function(q, k, lse, *rest, **BRANCHES, **TORCHSCALE)
        got = function(*on_gpu, *rest, **BRANCHES, **TORCHSCALE)
        assert got.is_cuda and torch.allclose(got.cpu(), expected, atol=1e-11)
