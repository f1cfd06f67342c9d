"""torch.compile, export and fake tensors see one opaque operator with shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import encke

MIX = dict(segment_lengths=[4, 12], dilation_rates=[1, 3], mode="mix")
DETACHED = dict(MIX, mixing_gradient="detached")
FKODOM = dict(segment_lengths=[4, 12], dilation_rates=[1, 3], mode="fkodom")


def inputs(randn, heads=2):
    q = randn(1, 12, heads, 4, requires_grad=True)
    return q, randn(1, 12, 2, 4, requires_grad=True), randn(1, 12, 2, 4, requires_grad=True)


@pytest.mark.parametrize("options", [dict(causal=True), DETACHED, dict(sharding=[0, 3])], ids=str)
def test_a_whole_graph_forward_and_backward(randn, options):
    def layer(q, k, v):
        out, lse = encke.attention(q * 2, k, v, **options, return_lse=True)
        return out.sin().sum() + lse.nan_to_num(neginf=0.0).sum()

    given = inputs(randn)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(*given), given)
    for got, wanted in zip(torch.autograd.grad(compiled(*given), given), expected):
        torch.testing.assert_close(got, wanted)


def test_inductor(randn):
    """The default backend, on attention alone, which needs no C++ compiler."""
    compiled = torch.compile(lambda q, k, v: encke.attention(q, k, v, causal=True), fullgraph=True)
    given = [x.detach() for x in inputs(randn)]
    assert torch.equal(compiled(*given), encke.attention(*given, causal=True))


@pytest.mark.parametrize("options", [dict(causal=True), DETACHED, FKODOM], ids=str)
def test_fake_tensors_have_the_shapes_and_types_of_real_ones(options):
    real = [torch.randn(2, 24, 4, 8, dtype=torch.bfloat16) for _ in range(3)]
    real_results = encke.attention(*real, **options, return_lse=True)
    with FakeTensorMode() as mode:
        fake_results = encke.attention(*map(mode.from_tensor, real), **options, return_lse=True)
    for fake, wanted in zip(fake_results, real_results):
        assert (fake.shape, fake.dtype, fake.stride()) == (
            wanted.shape,
            wanted.dtype,
            wanted.stride(),
        )


@pytest.mark.parametrize(
    "options", [dict(causal=True), DETACHED, dict(checkpoint="recompute")], ids=str
)
def test_opcheck(randn, options):
    from encke import _torch
    from encke.options import from_keywords

    options = tuple(from_keywords(dict(options)))
    arguments = (*inputs(randn), *_torch.MaskTensors(), *_torch.operator_arguments(options))
    torch.library.opcheck(_torch._attention_operator, arguments)


def test_autocast_inside_a_compiled_function(randn):
    def layer(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return encke.attention(q, k, v)

    given = [x.detach().float() for x in inputs(randn)]
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, layer(*given))
