"""Dropout, whose coins are those of the specification on every ring, and values of another width
than keys."""

import numpy
import pytest
import torch

import encke
import oracle
from test_masks import DOCUMENTS, GROUP, MIX, RINGS, TOKENS, compare, inputs, refused

OPTIONS = {
    "dense": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(6, 0), prefix=2),
    "documents": dict(documents=DOCUMENTS),
    "mix": dict(MIX, causal=True),
    "group": GROUP,
    "scores": dict(softcap=2.0, alibi_slopes=True, causal=True),
    "recompute": dict(causal=True, checkpoint="recompute"),
}


def without_policy(options):
    return {name: x for name, x in options.items() if name != "checkpoint"}


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dropout_equals_dense_attention_with_the_same_coins(randn, options, ring):
    q, k, v = inputs(randn)
    sinks = randn(4, requires_grad=True)
    options = dict(options, dropout=0.3, seed=2**63 + 12345, sinks=sinks)
    compare(
        lambda: encke.attention(q, k, v, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, **without_policy(options)),
        (q, k, v, sinks),
        randn,
    )


def test_dropout_of_fewer_queries(randn):
    q = randn(2, 7, 4, 8, requires_grad=True)
    k, v = (randn(2, TOKENS, 2, 8, requires_grad=True) for _ in range(2))
    options = dict(dropout=0.5, seed=7, causal=True, query_offset=19)
    compare(
        lambda: encke.attention(q, k, v, ranks=2, **options, return_lse=True),
        lambda: oracle.attention(q, k, v, **options),
        (q, k, v),
        randn,
    )


def test_seeds(randn):
    q, k, v = (x.detach().float() for x in inputs(randn))
    one, two = (encke.attention(q, k, v, dropout=0.2, seed=seed) for seed in (1, 2))
    assert torch.equal(one, encke.attention(q, k, v, dropout=0.2, seed=torch.tensor(1)))
    assert not torch.equal(one, two)
    assert torch.equal(
        encke.attention(q, k, v, dropout=0.0, seed=1), encke.attention(q, k, v)
    )
    # The default seed is of torch's generator, and the backward pass has it, too.
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    q.requires_grad_()
    expected = encke.attention(q, k, v, dropout=0.2, seed=seed)
    torch.manual_seed(5)
    got = encke.attention(q, k, v, dropout=0.2)
    assert torch.equal(got, expected)
    gradients = [torch.autograd.grad(out.sum(), q)[0] for out in (got, expected)]
    assert torch.equal(*gradients)
    assert not torch.equal(got, encke.attention(q, k, v, dropout=0.2))


def test_the_mean_of_dropout_is_attention(randn):
    q, k, v = (x.detach().float() for x in inputs(randn))
    runs = [encke.attention(q, k, v, dropout=0.4, seed=seed) for seed in range(300)]
    exact = encke.attention(q, k, v)
    assert (torch.stack(runs).mean(0) - exact).abs().max() < 0.2


def test_dropout_in_a_whole_graph(randn):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v, seed):
        return encke.attention(q * 2, k, v, causal=True, dropout=0.3, seed=seed).sin().sum()

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in (3, 4):
        given = inputs(randn)
        seed = torch.tensor(seed)
        expected = torch.autograd.grad(layer(*given, seed), given)
        for got, wanted in zip(torch.autograd.grad(compiled(*given, seed), given), expected):
            assert torch.equal(got, wanted)
    assert len(graphs) == 1
    drawn = torch.compile(
        lambda q, k, v: encke.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(drawn(*given), drawn(*given))
    torch._dynamo.reset()


def test_numpy_arrays_and_padded_batches(randn):
    q, k, v = inputs(randn)
    dout = randn(*q.shape)
    options = dict(dropout=0.3, seed=9, key_lengths=[20, 37], causal=True)
    out = encke.attention(q, k, v, **options)
    assert (out[0, 20:] == 0).all()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    assert numpy.array_equal(encke.attention(*arrays, **options), out.detach().numpy())
    got = encke.attention_backward(*arrays, dout.numpy(), **options)
    assert all(numpy.array_equal(a, b.numpy()) for a, b in zip(got, gradients))
    # A pair has the coin of its batch entry, as in a batch without padding.
    expected, _ = oracle.attention(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    without = dict(dropout=0.3, seed=9, causal=True)
    whole = encke.attention(q, k, v, **without)
    torch.testing.assert_close(out[1], whole[1], rtol=1e-12, atol=1e-12)
    documents = [5, 30, 2]
    out = encke.attention(q, k, v, **options, documents=documents)
    expected, _ = oracle.attention(q, k, v, **options, documents=documents)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert not numpy.array_equal(*(encke.attention(*arrays, dropout=0.5) for _ in range(2)))


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("width", [3, 16])
def test_values_of_another_width_equal_dense_attention(randn, options, ring, width):
    q = randn(2, TOKENS, 4, 8, requires_grad=True)
    k = randn(2, TOKENS, 2, 8, requires_grad=True)
    v = randn(2, TOKENS, 2, width, requires_grad=True)
    sinks = randn(4, requires_grad=True)
    options = dict(options, sinks=sinks)
    compare(
        lambda: encke.attention(q, k, v, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, **without_policy(options)),
        (q, k, v, sinks),
        randn,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_and_width_in_low_precision(randn, dtype):
    options = dict(causal=True, dropout=0.25, seed=4)
    wide = [randn(2, 100, 4, 32), randn(2, 100, 2, 32), randn(2, 100, 2, 48)]
    dout = randn(2, 100, 4, 48).to(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in wide)
    out = encke.attention(q, k, v, **options)
    out.backward(dout)
    exact = [x.to(dtype).double().requires_grad_() for x in wide]
    expected, _ = oracle.attention(*exact, **options)
    expected.backward(dout.double())
    pairs = [(out, expected)] + [(x.grad, y.grad) for x, y in zip((q, k, v), exact)]
    for got, wanted in pairs:
        assert got.dtype == dtype
        size = wanted.abs().max()
        assert (got.double() - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("options", [{}, dict(MIX, mixing_gradient="detached")], ids=str)
def test_values_of_another_width_in_a_whole_graph(randn, options):
    def layer(q, k, v):
        out, lse = encke.attention(q * 2, k, v, **options, return_lse=True)
        return out.sin().sum() + lse.nan_to_num(neginf=0.0).sum()

    given = [randn(1, 12, 2, dim, requires_grad=True) for dim in (4, 4, 6)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(*given), given)
    for got, wanted in zip(torch.autograd.grad(compiled(*given), given), expected):
        torch.testing.assert_close(got, wanted)
    torch._dynamo.reset()


def test_padded_batches_and_the_lse_alone(randn):
    q, k, v = (randn(2, TOKENS, 2, dim, requires_grad=True) for dim in (8, 8, 5))
    out, lse = encke.attention(q, k, v, key_lengths=[30, 37], return_lse=True)
    assert out.shape == (2, TOKENS, 2, 5) and (out[0, 30:] == 0).all()
    dq, dv = torch.autograd.grad(lse[1].sum(), (q, v))
    assert dq.shape == q.shape and (dv == 0).all()


def test_errors_name_the_number():
    q, k, v = (torch.zeros(1, 16, 4, 8) for _ in range(3))
    refused(ValueError, "dropout is 1.0", q, k, v, dropout=1.0, seed=1)
    refused(ValueError, "dropout is -0.1", q, k, v, dropout=-0.1)
    refused(ValueError, "seed is -1", q, k, v, dropout=0.1, seed=-1)
    refused(ValueError, "seed is 18446744073709551616", q, k, v, dropout=0.1, seed=2**64)
    with pytest.raises(ValueError, match="dropout=0.1 needs a seed"):
        encke.explain(tokens=8, heads=1, dim=8, dropout=0.1)
