"""Sinks with their gradient, sequences of different lengths, and right-padded batches."""

import math

import numpy
import pytest
import torch
from torch.autograd import gradcheck

import encke
import oracle
from test_masks import DOCUMENTS, GROUP, MIX, RINGS, TOKENS, compare, inputs, refused


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(MIX, window=(9, 2)),
        GROUP,  # rows without keys
        dict(documents=DOCUMENTS, window=(3, 0), prefix=1, softcap=2.0, causal=True),
        dict(causal=True, checkpoint="recompute"),
    ],
    ids=str,
)
def test_sinks_equal_one_more_key_without_a_value(randn, options, ring):
    q, k, v = inputs(randn)
    sinks = randn(4, requires_grad=True)
    expected = {name: x for name, x in options.items() if name != "checkpoint"}
    compare(
        lambda: encke.attention(q, k, v, sinks=sinks, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, sinks=sinks, **expected),
        (q, k, v, sinks),
        randn,
    )


def test_gradcheck_of_sinks(randn):
    q, k, v = (randn(1, 9, 2, 3, requires_grad=True) for _ in range(3))
    sinks = randn(2, requires_grad=True)

    def call(q, k, v, sinks):
        return encke.attention(q, k, v, sinks=sinks, causal=True, window=(4, 0), return_lse=True)

    assert gradcheck(call, (q, k, v, sinks))


def test_gradients_of_sinks_alone_and_their_type(randn):
    q, k, v = (x.detach() for x in inputs(randn))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        sinks = torch.nn.Parameter(randn(4).to(dtype))
        encke.attention(q, k, v, sinks=sinks).square().sum().backward()
        assert sinks.grad.dtype == dtype and sinks.grad.shape == (4,)
        wide = sinks.detach().double().requires_grad_()
        oracle.attention(q, k, v, sinks=wide)[0].square().sum().backward()
        off = (sinks.grad.double() - wide.grad).abs().max() / wide.grad.abs().max()
        assert off <= 4 * torch.finfo(dtype).eps + 1e-12
    # Without a gradient, from a list, and a sink that takes no weight.
    plain, lse = encke.attention(q, k, v, return_lse=True)
    nothing = [-math.inf] * 4
    got = encke.attention(q, k, v, sinks=nothing, return_lse=True)
    assert torch.equal(got[0], plain) and torch.equal(got[1], lse)


def test_second_order_gradients_of_sinks_are_refused(randn):
    q, k, v = inputs(randn)
    sinks = randn(4, requires_grad=True)
    out = encke.attention(q, k, v, sinks=sinks)
    (of_sinks,) = torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="first order only"):
        of_sinks.sum().backward()


@pytest.mark.parametrize("options", [{}, dict(MIX, causal=True), dict(window=(2, 4))], ids=str)
def test_varlen_equals_a_call_for_each_sequence(randn, options):
    q, k, v = (x.detach()[0].float().requires_grad_() for x in inputs(randn, batch=1))
    sums = torch.tensor([0, 5, 5, 24, 25, 37], dtype=torch.int32)
    out, lse = encke.varlen_attention(q, k, v, sums, **options, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    for begin, end in zip(sums.tolist(), sums.tolist()[1:]):
        if begin == end:
            continue
        own = [x.detach()[begin:end].requires_grad_() for x in (q, k, v)]
        alone = encke.attention(*(x[None] for x in own), **options)[0]
        assert torch.equal(out[begin:end], alone)
        for whole, part in zip(gradients, torch.autograd.grad(alone.square().sum(), own)):
            assert torch.equal(whole[begin:end], part)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    got = encke.varlen_attention(*arrays, sums.numpy(), **options)
    assert isinstance(got, numpy.ndarray) and numpy.array_equal(got, out.detach().numpy())


def test_errors_of_varlen(randn):
    q = randn(12, 2, 4)
    with pytest.raises(ValueError, match=r"k has 4 dimensions.*\[tokens, heads, dim\]"):
        encke.varlen_attention(q, q[None], q, [0, 12])
    with pytest.raises(ValueError, match="11 tokens together.*12"):
        encke.varlen_attention(q, q, q, [0, 11])
    with pytest.raises(TypeError, match="leave documents out"):
        encke.varlen_attention(q, q, q, [0, 12], documents=[12])
    with pytest.raises(TypeError, match="leave key_lengths out"):
        encke.varlen_attention(q, q, q, [0, 12], key_lengths=[12])


LENGTHS = [20, 37, 0, 1]


@pytest.mark.parametrize("ring", [{}, dict(ranks=3), dict(ranks=2, sharding="balanced")], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True, window=(5, 0), prefix=2),
        dict(MIX, causal=True),
        dict(documents=DOCUMENTS, causal=True),
        dict(GROUP, checkpoint="recompute"),
        dict(with_sinks=True, softcap=2.0, alibi_slopes=True),
    ],
    ids=str,
)
def test_padded_batches_equal_dense_attention(randn, options, ring):
    options = dict(options)
    q, k, v = inputs(randn, batch=4)
    given = (q, k, v)
    if options.pop("with_sinks", False):
        options["sinks"] = randn(4, requires_grad=True)
        given = (*given, options["sinks"])
    expected = {name: x for name, x in options.items() if name != "checkpoint"}
    compare(
        lambda: encke.attention(q, k, v, key_lengths=LENGTHS, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, key_lengths=LENGTHS, **expected),
        given,
        randn,
    )


def test_padding_is_neither_read_nor_written(randn):
    q, k, v = (x.detach() for x in inputs(randn, batch=4))
    padded = [x.clone() for x in (q, k, v)]
    for x in padded:
        for entry, length in enumerate(LENGTHS):
            x[entry, length:] = math.nan
        x.requires_grad_()
    lengths = torch.tensor(LENGTHS)
    out, lse = encke.attention(*padded, key_lengths=lengths, causal=True, return_lse=True)
    out.sum().backward()
    for entry, length in enumerate(LENGTHS):
        assert (out[entry, length:] == 0).all() and (lse[entry, length:] == -math.inf).all()
        for x in padded:
            assert (x.grad[entry, length:] == 0).all() and x.grad[entry].isfinite().all()
        if length:
            own = (x[entry : entry + 1, :length].contiguous() for x in (q, k, v))
            assert torch.equal(out[entry, :length], encke.attention(*own, causal=True)[0])


def test_a_batch_of_nothing(randn):
    q, k, v = inputs(randn)
    out, lse = encke.attention(q, k, v, key_lengths=[0, 0], return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_detached_mixing_of_padded_batches(randn):
    options = dict(MIX, mixing_gradient="detached")
    q, k, v = inputs(randn)
    out = encke.attention(q, k, v, key_lengths=[37, 20], **options)
    dout = randn(*q.shape)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    own = [x.detach()[1:, :20].requires_grad_() for x in (q, k, v)]
    alone = encke.attention(*own, **options)
    assert torch.equal(out[1:, :20], alone)
    for whole, part in zip(gradients, torch.autograd.grad(alone, own, dout[1:, :20])):
        assert torch.equal(whole[1:, :20], part)


def test_numpy_arrays(randn):
    q, k, v = inputs(randn)
    sinks = randn(4, requires_grad=True)
    options = dict(causal=True, window=(6, 0), key_lengths=[30, 37], alibi_slopes=True)
    out, lse = encke.attention(q, k, v, sinks=sinks, **options, return_lse=True)
    dout = randn(*q.shape)
    expected = torch.autograd.grad(out, (q, k, v, sinks), dout)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    given = dict(options, sinks=sinks.detach().numpy())
    got, got_lse = encke.attention(*arrays, **given, return_lse=True)
    assert numpy.array_equal(got, out.detach().numpy())
    assert numpy.array_equal(got_lse, lse.detach().numpy())
    for saved in (dict(out=got, lse=got_lse), {}):
        gradients = encke.attention_backward(*arrays, dout.numpy(), **saved, **given)
        assert len(gradients) == 4
        for a, b in zip(gradients, expected):
            assert numpy.array_equal(a, b.numpy())


def test_errors_name_the_number():
    q, k, v = (torch.zeros(2, 16, 4, 8) for _ in range(3))
    refused(ValueError, r"sinks has shape \[3\], expected \[4\]", q, k, v, sinks=torch.zeros(3))
    refused(ValueError, r"sinks has shape \[1, 4\]", q, k, v, sinks=torch.zeros(1, 4))
    refused(TypeError, "sinks is torch.int64", q, k, v, sinks=torch.zeros(4, dtype=torch.int64))
    detached = dict(MIX, mixing_gradient="detached")
    refused(ValueError, "sinks and branches", q, k, v, sinks=torch.zeros(4), **detached)
    refused(ValueError, "has 3 numbers for a batch of 2", q, k, v, key_lengths=[1, 2, 3])
    refused(ValueError, r"key_lengths\[1\] is 17, but there are 16", q, k, v, key_lengths=[1, 17])
    refused(ValueError, r"key_lengths\[0\] is -1", q, k, v, key_lengths=[-1, 3])
    refused(ValueError, "with key_lengths both", q[:, :8], k, v, key_lengths=[1, 8])
    refused(ValueError, "sharding is .0, 5.", q, k, v, key_lengths=[1, 8], sharding=[0, 5])
    refused(ValueError, "15 tokens together", q, k, v, key_lengths=[1, 8], documents=[15])
    arrays = [x.numpy() for x in (q, k, v)]
    refused(ValueError, r"sinks.*\[3\].*\[4\]", *arrays, sinks=[0.0] * 3)


def test_the_attentions_of_packings_do_not_accumulate(randn):
    from encke import options

    q, k, v = (randn(1, 40, 2, 4) for _ in range(3))
    for length in range(1, 30):
        encke.attention(q, k, v, documents=[length, 40 - length])
    assert len(options._packed) <= options._MAX_PACKED


def test_tokens_are_those_of_the_masks():
    assert sum(DOCUMENTS) == TOKENS


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "documents", "key_lengths"])
def test_masked_lists_of_numbers_are_refused(name):
    values = numpy.ma.masked_array([1, 2], mask=[False, True])
    q = numpy.zeros((2, 3, 2, 4))
    with pytest.raises(TypeError, match=f"{name} is a masked array"):
        encke.attention(q, q, q, **{name: values})
