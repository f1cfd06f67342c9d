"""Windows, prefixes, documents, softcaps and slopes against dense attention with the mask written
out pair by pair, forward and backward, on every kind of ring."""

import json
import math
import struct
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import encke
import oracle

EXACT = dict(rtol=1e-12, atol=1e-12)
CLOSE = dict(rtol=1e-11, atol=1e-11)
MIX = dict(segment_lengths=[8, 24], dilation_rates=[1, 3], mode="mix")
GROUP = dict(segment_lengths=[6, 20], dilation_rates=[1, 2])
DOCUMENTS = [5, 0, 19, 1, 12]
MASKS = {
    "window": dict(window=(4, 3)),
    "left": dict(window=(5, None), causal=True),
    "right": dict(window=(None, 2)),
    "nothing but itself": dict(window=(0, 0)),
    "prefix": dict(window=(3, 0), prefix=4, causal=True),
    "prefix ahead": dict(window=(3, 1), prefix=7),
    "documents": dict(documents=DOCUMENTS),
    "documents causal": dict(documents=DOCUMENTS, causal=True),
    "documents window prefix": dict(documents=DOCUMENTS, window=(3, 0), prefix=2, causal=True),
    "documents mix": dict(MIX, documents=DOCUMENTS, causal=True),
    "window mix": dict(MIX, window=(7, 7)),
    "window group": dict(GROUP, window=(6, 0), causal=True),
    "softcap": dict(softcap=1.5, causal=True),
    "slopes": dict(alibi_slopes=[0.5, 0.25, 0.0, -0.1]),
    "usual slopes": dict(alibi_slopes=True, causal=True),
    "all": dict(
        documents=DOCUMENTS, window=(6, 2), prefix=1, softcap=2.0, alibi_slopes=True, scale=0.6
    ),
}
RINGS = [
    {},
    dict(ranks=3),
    dict(ranks=4, sharding="zigzag"),
    dict(ranks=2, sharding="striped"),
    dict(ranks=3, sharding="balanced"),
    dict(sharding=[0, 5, 5, 30], redundancy=1),
    dict(ranks=3, queries="replicated"),
]
TOKENS = 37


def inputs(randn, batch=2):
    q = randn(batch, TOKENS, 4, 8, requires_grad=True)
    k, v = (randn(batch, TOKENS, 2, 8, requires_grad=True) for _ in range(2))
    return q, k, v


def compare(call, expected_call, given, randn):
    """out, lse and all gradients of two calls."""
    results = []
    dout, dlse = randn(*given[0].shape[:3], given[2].shape[3]), randn(*given[0].shape[:3])
    for function in (call, expected_call):
        out, lse = function()
        finite = lse.isfinite()
        loss = (out * dout).sum() + (lse[finite] * dlse[finite]).sum()
        results.append((out, lse, *torch.autograd.grad(loss, given)))
    for name, got, wanted in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), *results):
        assert_close(got, wanted, **CLOSE, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_masks_equal_dense_attention(randn, options, ring):
    q, k, v = inputs(randn)
    compare(
        lambda: encke.attention(q, k, v, **options, **ring, return_lse=True),
        lambda: oracle.attention(q, k, v, **options),
        (q, k, v),
        randn,
    )


@pytest.mark.parametrize("name", ["window", "prefix", "documents", "documents window prefix"])
def test_masks_equal_torch_attention_with_a_boolean_mask(randn, name):
    options = MASKS[name]
    q, k, v = (x.detach() for x in inputs(randn))
    given = {"causal": False, "window": None, "prefix": 0, "documents": None, **options}
    seen = oracle.visible(TOKENS, TOKENS, query_offset=None, **given)
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*by_head, attn_mask=seen, enable_gqa=True)
    assert_close(encke.attention(q, k, v, **options), expected.transpose(1, 2), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_in_low_precision(randn, dtype):
    options = dict(MASKS["all"], causal=True)
    wide = [x.detach() for x in inputs(randn)]
    dout = randn(2, TOKENS, 4, 8).to(dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in wide)
    out = encke.attention(q, k, v, **options)
    assert out.dtype == dtype
    out.backward(dout)
    exact = [x.to(dtype).double().requires_grad_() for x in wide]
    expected, _ = oracle.attention(*exact, **options)
    expected.backward(dout.double())
    pairs = [(out, expected)] + [(x.grad, y.grad) for x, y in zip((q, k, v), exact)]
    for got, wanted in pairs:
        size = wanted.abs().max()
        assert (got.double() - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize(
    "options", [dict(causal=True), MIX, dict(window=(3, 3), prefix=1)], ids=str
)
def test_a_packed_call_has_the_bits_of_a_call_for_each_document(randn, options):
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(randn))
    packed = encke.attention(q, k, v, documents=DOCUMENTS, **options, return_lse=True)
    dout = randn(2, TOKENS, 4, 8).float()
    gradients = torch.autograd.grad(packed[0], (q, k, v), dout)
    first = 0
    for length in filter(None, DOCUMENTS):
        rows = slice(first, first + length)
        own = [x.detach()[:, rows].requires_grad_() for x in (q, k, v)]
        alone = encke.attention(*own, **options, return_lse=True)
        for whole, part in zip(packed, alone):
            assert torch.equal(whole[:, rows], part)
        for whole, part in zip(gradients, torch.autograd.grad(alone[0], own, dout[:, rows])):
            assert torch.equal(whole[:, rows], part)
        first += length


def test_cu_seqlens_are_documents(randn):
    q, k, v = (x.detach() for x in inputs(randn))
    expected = encke.attention(q, k, v, documents=DOCUMENTS)
    sums = [0, 5, 5, 24, 25, 37]
    for given in (sums, tuple(sums), torch.tensor(sums, dtype=torch.int32), numpy.array(sums)):
        assert torch.equal(encke.attention(q, k, v, cu_seqlens=given), expected)
    assert torch.equal(encke.attention(q, k, v, documents=torch.tensor(DOCUMENTS)), expected)


def test_slopes_may_be_a_tensor(randn):
    q, k, v = (x.detach() for x in inputs(randn))
    expected = encke.attention(q, k, v, alibi_slopes=True)
    usual = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)])
    for slopes in (usual, usual.tolist(), usual.numpy()):
        assert torch.equal(encke.attention(q, k, v, alibi_slopes=slopes), expected)
    assert torch.equal(
        encke.attention(q, k, v, alibi_slopes=False), encke.attention(q, k, v)
    )


def test_explain_and_report_take_masks(randn):
    text = encke.explain(tokens=64, heads=2, dim=8, causal=True, window=(7, 0), documents=[60, 4])
    assert "window 7,0" in text and "2 documents" in text
    q, k, v = (x.detach() for x in inputs(randn))
    result = encke.report(q, k, v, cu_seqlens=[0, 30, 37], softcap=3.0)
    assert torch.equal(result["out"], encke.attention(q, k, v, documents=[30, 7], softcap=3.0))


FOLDER = Path(__file__).parents[2] / "testdata" / "golden" / "masks"


def read(path):
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), file.read()
    config = json.loads(header.pop("__metadata__")["config"])
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        array = numpy.frombuffer(data[begin:end], numpy.float64)
        tensors[name] = torch.tensor(array.reshape(about["shape"]))
    return tensors, config


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.safetensors")), ids=lambda path: path.stem)
def test_results_equal_those_of_other_packages(path, ranks):
    tensors, config = read(path)
    names = ("causal", "softcap", "alibi_slopes", "documents", "query_offset")
    given = {name: config[name] for name in names if name in config}
    if "window_left" in config:
        given["window"] = (config["window_left"], config.get("window_right"))
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    sinks = tensors["sinks"].requires_grad_() if "sinks" in tensors else None
    out, lse = encke.attention(q, k, v, **given, sinks=sinks, ranks=ranks, return_lse=True)
    out.backward(tensors["do"])
    got = dict(out=out, lse=lse, dq=q.grad, dk=k.grad, dv=v.grad)
    if sinks is not None:
        got["dsinks"] = sinks.grad
    assert len(got) >= 5
    for name in got.keys() & tensors.keys():
        off = (got[name].detach() - tensors[name]).abs().max() / tensors[name].abs().max()
        assert off <= 1e-12, f"{name} is off by {off:.1e}"


def refused(kind, words, q, k, v, **options):
    with pytest.raises(kind, match=words):
        encke.attention(q, k, v, **options)


def test_errors_name_the_number():
    q, k, v = (torch.zeros(2, 16, 4, 8) for _ in range(3))
    refused(TypeError, r"window is 4.*\(3, 0\)", q, k, v, window=4)
    refused(ValueError, r"window is \(-1, 0\)", q, k, v, window=(-1, 0))
    refused(ValueError, "window has 3 numbers", q, k, v, window=(1, 2, 3))
    refused(ValueError, "prefix is -2", q, k, v, window=(1, 0), prefix=-2)
    refused(ValueError, "prefix=2 has an effect only with a window", q, k, v, prefix=2)
    refused(ValueError, "documents have 15 tokens together.*16", q, k, v, documents=[10, 5])
    refused(ValueError, r"documents\[1\] is -5", q, k, v, documents=[10, -5, 11])
    refused(TypeError, r"documents\[0\] is 1.5", q, k, v, documents=[1.5])
    refused(ValueError, "sum of the document lengths is 0", q, k, v, documents=[])
    refused(ValueError, "two forms", q, k, v, documents=[16], cu_seqlens=[0, 16])
    refused(ValueError, r"cu_seqlens is \[1, 16\]", q, k, v, cu_seqlens=[1, 16])
    refused(ValueError, r"cu_seqlens\[2\] is 3, after 9", q, k, v, cu_seqlens=[0, 9, 3, 16])
    refused(ValueError, "shape .1, 2.", q, k, v, cu_seqlens=torch.tensor([[0, 16]]))
    refused(ValueError, "softcap is -1", q, k, v, softcap=-1.0)
    refused(ValueError, "3 ALiBi slopes for 4", q, k, v, alibi_slopes=[1.0, 2.0, 3.0])
    refused(ValueError, "slope of head 1 is NaN", q, k, v, alibi_slopes=[0, math.nan, 0, 0])
    fkodom = dict(segment_lengths=[8], dilation_rates=[1], mode="fkodom")
    refused(ValueError, "packed sequence.*fkodom", q, k, v, documents=[8, 8], **fkodom)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_gradient_of_sinks_by_torchs_operations_is_that_of_the_library(randn, with_dlse):
    """A GPU computes it so, and torch computes the same on any device."""
    from encke import _gpu

    q, k, v = randn(2, 12, 4, 8), randn(2, 12, 2, 8), randn(2, 12, 2, 8)
    sinks = torch.tensor([0.4, -2.0, 5.0, -math.inf], dtype=torch.float64, requires_grad=True)
    mask = dict(window=(3, 0), documents=[5, 7])
    right = encke.attention(q, k, v, sinks=sinks, return_lse=True, **mask)
    dout, dlse = randn(2, 12, 4, 8), randn(2, 12, 4) if with_dlse else None
    loss = (right[0] * dout).sum() + (0 if dlse is None else (right[1] * dlse).sum())
    (want,) = torch.autograd.grad(loss, sinks)
    dsinks = _gpu.sink_gradient(sinks, *(x.detach() for x in right), dout, dlse)
    torch.testing.assert_close(dsinks, want, rtol=1e-12, atol=1e-12)

