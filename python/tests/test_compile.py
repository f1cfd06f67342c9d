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


def check_whole_graph(randn, options):
    """Compiled without a graph break, and with the gradients of the call that is not compiled."""

    def layer(q, k, v):
        out, lse = encke.attention(q * 2, k, v, **options, return_lse=True)
        return out.sin().sum() + lse.nan_to_num(neginf=0.0).sum()

    given = inputs(randn)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(*given), given)
    for got, wanted in zip(torch.autograd.grad(compiled(*given), given), expected):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("options", [dict(causal=True), DETACHED, dict(sharding=[0, 3])], ids=str)
def test_a_whole_graph_forward_and_backward(randn, options):
    check_whole_graph(randn, options)


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


def test_masks_in_a_whole_graph(randn):
    """Sinks, packings and lengths are tensors of the graph: others need no new one."""
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    def layer(q, k, v, sinks, cu_seqlens, slopes):
        out = encke.attention(
            q * 2,
            k,
            v,
            causal=True,
            window=(5, 0),
            prefix=1,
            softcap=3.0,
            sinks=sinks,
            cu_seqlens=cu_seqlens,
            alibi_slopes=slopes,
        )
        return out.sin().sum()

    sinks = randn(2, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for sums in ([0, 5, 12], [0, 3, 12]):
        given = (*inputs(randn), sinks)
        masks = (torch.tensor(sums), torch.tensor([0.5, 0.25]))
        expected = torch.autograd.grad(layer(*given, *masks), given)
        for got, wanted in zip(torch.autograd.grad(compiled(*given, *masks), given), expected):
            assert torch.equal(got, wanted)
    assert len(compiled_graphs) == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(documents=[5, 7], alibi_slopes=True),
        dict(documents=torch.tensor([5, 7]), alibi_slopes=[0.5, 0.25]),
        dict(key_lengths=torch.tensor([7]), causal=True),
        dict(key_lengths=[7], cu_seqlens=[0, 5, 12]),
        dict(DETACHED, key_lengths=[9]),
        dict(sinks=torch.tensor([0.5, -0.5], dtype=torch.float64), checkpoint="recompute"),
        dict(causal=True, window=(3, None), sharding="balanced", ranks=2),
    ],
    ids=str,
)
def test_every_mask_in_a_whole_graph(randn, options):
    check_whole_graph(randn, options)
    torch._dynamo.reset()


def test_varlen_in_a_whole_graph(randn):
    def layer(q, k, v, sums):
        return encke.varlen_attention(q, k, v, sums, causal=True).sin().sum()

    given = [x.detach()[0].requires_grad_() for x in inputs(randn)]
    sums = torch.tensor([0, 4, 12], dtype=torch.int32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(*given, sums), given)
    for got, wanted in zip(torch.autograd.grad(compiled(*given, sums), given), expected):
        assert torch.equal(got, wanted)


def test_opcheck_of_mask_tensors(randn):
    from encke import _torch
    from encke.options import from_keywords

    flat = _torch.operator_arguments(tuple(from_keywords(dict(causal=True, window=(4, 0)))))
    tensors = _torch.MaskTensors(
        sinks=randn(2, requires_grad=True),
        cu_seqlens=torch.tensor([0, 5, 12]),
        slopes=torch.tensor([0.5, 0.25]),
        key_lengths=torch.tensor([9]),
    )
    torch.library.opcheck(_torch._attention_operator, (*inputs(randn), *tensors, *flat))


def of_torch_func(q, k, v):
    """A gradient, and gradients of each entry of a batch."""

    def loss(q):
        return encke.attention(q * 2, k, v, causal=True).sin().sum()

    def of_entry(q):
        return encke.attention(q[None], k, v, window=(4, 0)).sin().sum()

    return torch.func.grad(loss)(q), torch.func.vmap(torch.func.grad(of_entry))(q)


def test_gradients_of_torch_func_in_a_whole_graph(randn):
    given = [x.detach() for x in inputs(randn)]
    torch._dynamo.reset()
    compiled = torch.compile(of_torch_func, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(*given), of_torch_func(*given)):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def jvp(q, k, v, attend):
    return torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))


def dual(q, k, v, attend):
    with torch.autograd.forward_ad.dual_level():
        out = attend(torch.autograd.forward_ad.make_dual(q, q), k, v)
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def hessian(q, k, v, attend):
    return torch.func.hessian(lambda s: attend(q * s, k, v).sum())(q.new_ones(()))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("derivative", [jvp, dual, hessian])
def test_forward_mode_in_a_graph_is_refused(randn, derivative, fullgraph):
    """A graph would lose the tangents without a word."""
    given = [x.detach() for x in inputs(randn)]
    for options in ({}, dict(documents=[5, 7])):
        torch._dynamo.reset()
        compiled = torch.compile(derivative, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(Exception, match="no forward-mode derivative"):
            compiled(*given, lambda q, k, v: encke.attention(q, k, v, **options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_order_of_a_graph_is_refused(randn, backend):
    q, k, v = inputs(randn)
    torch._dynamo.reset()
    out = torch.compile(encke.attention, fullgraph=True, backend=backend)(q, k, v)
    with pytest.raises(RuntimeError, match="first order only|not currently support double"):
        (once,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        torch.autograd.grad(once.sum(), q)
