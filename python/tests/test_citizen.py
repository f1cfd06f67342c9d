"""Encke's calls as torch sees them: transforms, traces, modes, profilers, unusual tensors."""

import copy

import numpy
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import encke

SHAPE = (2, 12, 2, 4)
OPTIONS = {
    "dense": {},
    "window": dict(causal=True, window=(3, 0)),
    "documents": dict(causal=True, documents=[5, 7]),
    "detached": dict(
        segment_lengths=[4, 12], dilation_rates=[1, 3], mode="mix", mixing_gradient="detached"
    ),
    "recompute": dict(causal=True, checkpoint="recompute"),
}


def qkv(randn, *lead, requires_grad=False):
    return [randn(*lead, *SHAPE, requires_grad=requires_grad) for _ in range(3)]


def loss(q, k, v, **options):
    return encke.attention(q, k, v, **options).sin().sum()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_transforms_of_torch_func(randn, options):
    """grad, vjp, jacrev and vmap, of torch.func, beside autograd."""
    q, k, v = given = qkv(randn)
    tracked = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(loss(*tracked, **options), tracked)
    found = torch.func.grad(lambda q, k, v: loss(q, k, v, **options), argnums=(0, 1, 2))(*given)
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    out, pull = torch.func.vjp(lambda q: encke.attention(q, k, v, **options), q)
    torch.testing.assert_close(pull(out.cos())[0], expected[0], rtol=1e-12, atol=1e-12)
    rows = torch.func.jacrev(lambda q: encke.attention(q, k, v, **options)[0, 3, 1])(q)
    for at in range(SHAPE[3]):
        one = torch.autograd.grad(
            encke.attention(tracked[0], k, v, **options)[0, 3, 1, at], tracked[0]
        )[0]
        torch.testing.assert_close(rows[at], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 2), (None, 0, None)], ids=str)
def test_vmap(randn, options, dims):
    given = [
        randn(*SHAPE) if dim is None else randn(3, *SHAPE).movedim(0, dim) for dim in dims
    ]

    def each(at):
        return [x if dim is None else x.select(dim, at) for x, dim in zip(given, dims)]

    found = torch.func.vmap(lambda *x: encke.attention(*x, **options), dims)(*given)
    wanted = torch.stack([encke.attention(*each(at), **options) for at in range(3)])
    # Without a gradient, detached branches share one softmax, in another order of sums.
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    slopes = torch.func.vmap(torch.func.grad(lambda *x: loss(*x, **options)), dims)(*given)
    for at in range(3):
        one = torch.func.grad(lambda *x: loss(*x, **options))(*each(at))
        torch.testing.assert_close(slopes[at], one, rtol=1e-12, atol=1e-12)


def test_vmap_over_sinks(randn):
    q, k, v = qkv(randn)
    sinks = randn(3, SHAPE[2])
    found = torch.func.vmap(lambda s: encke.attention(q, k, v, sinks=s))(sinks)
    wanted = torch.stack([encke.attention(q, k, v, sinks=s) for s in sinks])
    assert torch.equal(found, wanted)


def test_forward_mode_is_refused(randn):
    q, k, v = qkv(randn)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: encke.attention(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            encke.attention(k, dual, v)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            encke.attention(k, dual, v, documents=[5, 7])
        encke.attention(k, k, v)


def test_second_order_is_refused(randn):
    q, k, v = qkv(randn)
    twice = torch.func.grad(lambda q: torch.func.grad(lambda q: loss(q, k, v))(q).sum())
    with pytest.raises(RuntimeError, match="first order only"):
        twice(q)


def test_traces_follow_their_inputs(randn):
    """A result that is kept as a constant would be the first one."""
    first, second = qkv(randn), qkv(randn)

    def call(q, k, v):
        return encke.attention(q, k, v, causal=True) * 2

    wanted = call(*second)
    assert torch.equal(torch.jit.trace(call, first)(*second), wanted)
    assert torch.equal(make_fx(call)(*first)(*second), wanted)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    exported = torch.export.export(Layer(), tuple(first))
    assert torch.equal(exported.module()(*second), wanted)


Q, K = torch.randn(2, *SHAPE, dtype=torch.float64)
LSE = torch.zeros(SHAPE[:3], dtype=torch.float64)
NO_OPERATORS = {
    "attention_backward": lambda x: encke.attention_backward(x, K, K, K)[0],
    "report": lambda x: encke.report(x, K, K)["out"],
    "attention_columns": lambda x: encke.attention_columns(x, K, LSE),
    "attention_rows": lambda x: encke.attention_rows(x, K, LSE, [0, 3]),
}


def summed(call):
    return lambda x: call(x).sum()


LOST = {
    "grad": lambda call: torch.func.grad(summed(call))(Q),
    "jvp": lambda call: torch.func.jvp(call, (Q,), (Q,)),
}
KEPT = {
    "make_fx": lambda call: make_fx(call)(Q)(2 * Q),
    "jit.trace": lambda call: torch.jit.trace(call, Q)(2 * Q),
    "vmap": lambda call: torch.func.vmap(call)(torch.stack([Q, 2 * Q]))[1],
}


@pytest.mark.parametrize("call", NO_OPERATORS.values(), ids=NO_OPERATORS)
@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_calls_that_are_no_operators_lose_no_derivative(call, lost):
    with pytest.raises(NotImplementedError, match="no rules|no forward-mode"):
        lost(call)


@pytest.mark.parametrize("name", NO_OPERATORS)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_calls_that_are_no_operators_are_no_constants(name, kept):
    call = NO_OPERATORS[name]
    if name == "attention_rows":
        torch.testing.assert_close(kept(call), call(2 * Q))
        return
    with pytest.raises(NotImplementedError, match="no operator|no rules"):
        kept(call)


def test_a_trace_keeps_no_mask():
    def call(x, mask):
        return encke.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    with pytest.raises(encke.MaskError, match="recognised once"):
        torch.jit.trace(call, (Q, torch.ones(2, 2, dtype=torch.bool).tril()))


def test_profilers_and_counters_see_the_call(randn):
    q, k, v = qkv(randn, requires_grad=True)
    with profile() as seen:
        encke.attention(q, k, v).sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert {"encke::attention", "encke::attention_backward"} <= names
    with FlopCounterMode(display=False) as counter:
        out = encke.attention(q, k, v)
    batch, tokens, heads, dim = SHAPE
    assert counter.get_total_flops() == 4 * batch * heads * tokens**2 * dim
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 10 * batch * heads * tokens**2 * dim


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing(randn, policy):
    q, k, v = qkv(randn, requires_grad=True)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    asked = []

    def decide(context, operator, *given, **named):
        asked.append(str(operator))
        return policy if "encke" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    found = checkpoint(
        loss, q, k, v, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(decide),
    )
    for got, wanted in zip(torch.autograd.grad(found, (q, k, v)), expected):
        assert torch.equal(got, wanted)
    assert "encke.attention.default" in asked


def test_inductor_forward_and_backward(randn):
    """The default backend. Encke's operators alone need no C++ compiler."""
    given = qkv(randn, requires_grad=True)
    call = torch.compile(lambda q, k, v: encke.attention(q, k, v, causal=True), fullgraph=True)
    dout = randn(*SHAPE)
    expected = torch.autograd.grad(encke.attention(*given, causal=True), given, dout)
    for got, wanted in zip(torch.autograd.grad(call(*given), given, dout), expected):
        assert torch.equal(got, wanted)
    given = [x.detach() for x in given]
    assert torch.equal(call(*given), encke.attention(*given, causal=True))


def test_a_default_device_does_not_move_options(randn):
    """Drawn seeds, and options that are given as lists, are on the host wherever tensors are made
    by default."""
    q, k, v = qkv(randn)
    options = dict(documents=[5, 7], sinks=[0.1, 0.2], alibi_slopes=[0.5, 0.25], dropout=0.5)
    wanted = encke.attention(q, k, v, **options, seed=3)
    with torch.device("meta"):
        assert torch.equal(encke.attention(q, k, v, **options, seed=3), wanted)
        with FlopCounterMode(display=False):
            assert torch.equal(encke.attention(q, k, v, **options, seed=3), wanted)
        assert encke.attention(q, k, v, **options).device == q.device


def test_slopes_that_require_a_gradient_are_refused(randn):
    q, k, v = qkv(randn)
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        encke.attention(q, k, v, alibi_slopes=slopes)
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="requires a gradient"):
        encke.attention(q, k, v, alibi_slopes=slopes)
    encke.attention(q, k, v, alibi_slopes=slopes.detach())


def test_functionalize(randn):
    q, k, v = qkv(randn)
    found = torch.func.functionalize(lambda q: encke.attention(q, k, v))(q)
    assert torch.equal(found, encke.attention(q, k, v))


# Unusual tensors: right, or a sentence.


def negated(randn):
    made = torch.complex(randn(*SHAPE), randn(*SHAPE)).conj().imag
    assert made.is_neg()
    return made


def test_views_that_are_negated_lazily(randn):
    q, k, v = qkv(randn, requires_grad=True)
    lazily = negated(randn)
    assert torch.equal(encke.attention(q, k, lazily), encke.attention(q, k, lazily.resolve_neg()))
    out = encke.attention(q, k, v)
    found = torch.autograd.grad(out, (q, k, v), lazily, retain_graph=True)
    for got, wanted in zip(found, torch.autograd.grad(out, (q, k, v), lazily.resolve_neg())):
        assert torch.equal(got, wanted)


def test_zero_tensors(randn):
    q, k, v = qkv(randn, requires_grad=True)
    zero = torch._efficientzerotensor(SHAPE, dtype=torch.float64)
    assert not encke.attention(q, k, zero).any()
    found = torch.autograd.grad(encke.attention(q, k, v), (q, k, v), zero)
    assert not any(gradient.any() for gradient in found)


def test_freed_storage_is_refused(randn):
    q, k, v = qkv(randn)
    v.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="v has no memory"):
        encke.attention(q, k, v)
    whole = randn(2, 12, 3, 2, 4)
    q, k, v = whole.unbind(2)
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        encke.attention(k, k, v)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda x: x.float().to_mkldnn()])
def test_layouts_without_rows_are_refused(randn, make):
    q, k, v = qkv(randn)
    with pytest.raises(TypeError, match="no memory of rows"):
        encke.attention(q, k, make(v))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(randn, layout):
    nested = torch.nested.nested_tensor([randn(8, 2, 4), randn(5, 2, 4)], layout=layout)
    with pytest.raises(TypeError, match="varlen_attention"):
        encke.attention(nested, nested, nested)


def test_masked_arrays_are_refused(randn):
    q, k, v = (x.numpy() for x in qkv(randn))
    with pytest.raises(TypeError, match="k is a masked array"):
        encke.attention(q, numpy.ma.masked_array(k, mask=k > 0), v)


def test_any_strides(randn):
    def strange(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    q, k, v = qkv(randn)
    wide = randn(2, 12, 2, 1).expand(-1, -1, -1, 4)
    assert torch.equal(
        encke.attention(strange(q), strange(k), strange(v)), encke.attention(q, k, v)
    )
    assert torch.equal(encke.attention(q, k, wide), encke.attention(q, k, wide.clone()))
    arrays = [x.numpy() for x in (q, k, v)]
    backwards = [x[:, ::-1, :, ::-1].copy()[:, ::-1, :, ::-1] for x in arrays]
    assert numpy.array_equal(encke.attention(*backwards), encke.attention(*arrays))


def test_gradients_reach_the_original_strides(randn):
    base = randn(2, 12, 4, 2, requires_grad=True)
    q, k, v = qkv(randn)
    loss(base.transpose(2, 3), k, v).backward()
    tracked = base.detach().transpose(2, 3).contiguous().requires_grad_()
    loss(tracked, k, v).backward()
    assert torch.equal(base.grad.transpose(2, 3), tracked.grad)


@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 5), (0, 5)), ((2, 0), (2, 5)), ((2, 0), (2, 0)), ((2, 3), (2, 0))]
)
def test_empty_batches_and_sequences(randn, queries, keys):
    q = randn(*queries, 4, 3, requires_grad=True)
    k = randn(*keys, 2, 3, requires_grad=True)
    v = randn(*keys, 2, 5, requires_grad=True)
    out, lse = encke.attention(q, k, v, return_lse=True)
    assert out.shape == (*queries, 4, 5) and not out.any()
    assert lse.shape == (*queries, 4) and (lse == -torch.inf).all()
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]
    assert not any(x.grad.any() for x in (q, k, v))
    arrays = [x.detach().numpy() for x in (q, k, v)]
    assert encke.attention(*arrays).shape == out.shape


def test_no_batch(randn):
    q, k, v = qkv(randn)
    out, lse = encke.attention(q, k, v, causal=True, return_lse=True)
    alone = encke.attention(q[0], k[0], v[0], causal=True, return_lse=True)
    assert torch.equal(alone[0], out[0]) and torch.equal(alone[1], lse[0])
    array = encke.attention(*(x[0].numpy() for x in (q, k, v)), causal=True)
    assert numpy.array_equal(array, out[0].numpy())
    with pytest.raises(ValueError, match=r"q has 3 dimensions.* and k is \[2, 12, 2, 4\]"):
        encke.attention(q[0], k, v)


def test_deepcopy_of_a_layer():
    layer = encke.nn.DilatedAttention([4, 8], [1, 2])
    assert copy.deepcopy(layer).segment_lengths == [4, 8]
