"""Unusual tensors given to every function and module: the right result, or one sentence, and never
a crash."""

import numpy
import pytest
import torch

import encke

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import encke.distributed as ring  # noqa: E402

SHAPE = (2, 12, 2, 4)
PATTERN = dict(segment_lengths=[4, 12], dilation_rates=[1, 2])


@pytest.fixture(scope="module", autouse=True)
def a_ring_of_one():
    """Calls over processes need a group; this one is of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K = (random(seed, *SHAPE) for seed in (1, 2))
LSE = random(3, *SHAPE[:3])


def with_sinks(q, k, v):
    return encke.attention(q, k, v, sinks=[0.5, -0.5])


def without_a_batch(q, k, v):
    return encke.varlen_attention(q[0], k[0], v if isinstance(v, list) else v[0], [0, 5, 12])


def heads_first(q, k, v):
    """The heads of torch's function are the tokens of the others."""
    return encke.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_bfloat16(q, k, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return encke.attention(q, k, v)


# Each takes q, k and v, of which only the last one is unusual.
CALLS = {
    "attention": lambda q, k, v: encke.attention(q, k, v, causal=True),
    "documents": lambda q, k, v: encke.attention(q, k, v, documents=[5, 7]),
    "key_lengths": lambda q, k, v: encke.attention(q, k, v, key_lengths=[5, 7]),
    "sinks": with_sinks,
    "documents, unusual q": lambda q, k, v: encke.attention(v, k, q, documents=[5, 7]),
    "autocast": in_bfloat16,
    "scaled_dot_product_attention": heads_first,
    "layer": encke.nn.DilatedAttention(**PATTERN),
    "attention_backward": lambda q, k, v: encke.attention_backward(q, k, v, Q)[0],
    "gradient": lambda q, k, v: encke.attention_backward(q, k, Q, v)[0],
    "report": lambda q, k, v: encke.report(q, k, v)["out"],
    "attention_rows": lambda q, k, v: encke.attention_rows(q, v, LSE, [0, 3]),
    "attention_columns": lambda q, k, v: encke.attention_columns(q, v, LSE),
    "ring": lambda q, k, v: ring.ring_attention(q, k, v, causal=True),
    "ring, documents": lambda q, k, v: ring.ring_attention(q, k, v, documents=[5, 7]),
    "ring layer": lambda q, k, v: ring.RingDilatedAttention(**PATTERN)(q, k, v),
}


class Wrapped(torch.Tensor):
    """A class without rules of its own."""


def negated(x):
    return torch.complex(x, -x).conj().imag


def with_an_offset(x):
    longer = torch.zeros(x.numel() + 3, dtype=x.dtype)
    longer[3:] = x.flatten()
    return longer[3:].view(x.shape)


RIGHT = {
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "one element": lambda x: x[..., :1].expand(-1, -1, -1, 4),
    "heads last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "an offset": with_an_offset,
    "lazily negated": negated,
    "a parameter": torch.nn.Parameter,
    "another class": lambda x: x.as_subclass(Wrapped),
    "zeros": lambda x: torch._efficientzerotensor(SHAPE, dtype=x.dtype),
}


def plain(x):
    if torch._is_zerotensor(x):
        return torch.zeros(SHAPE, dtype=x.dtype)
    return x.detach().as_subclass(torch.Tensor).resolve_neg().clone(
        memory_format=torch.contiguous_format
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_tensors_that_are_read_right(make, call):
    given = make(random(4, *SHAPE))
    found = call(Q, K, given).detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, call(Q, K, plain(given)), rtol=1e-13, atol=1e-13)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def freed_in_part(x):
    x.untyped_storage().resize_(x.nbytes // 2)
    return x


def nested(layout):
    return lambda x: torch.nested.nested_tensor(list(x), layout=layout)


def distributed(x):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    return distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()])


def array(change):
    return lambda x: change(x.numpy())


REFUSED = {
    "freed": (freed, "has no memory"),
    "freed, of other strides": (
        lambda x: freed(x.transpose(2, 3).contiguous().transpose(2, 3)), "has no memory"
    ),
    "freed in part": (freed_in_part, "has no memory"),
    "one element less": (
        lambda x: (x.untyped_storage().resize_(x.nbytes - 8), x)[1], "has no memory"
    ),
    "sparse": (torch.Tensor.to_sparse, "no memory of rows"),
    "nested": (nested(torch.strided), "varlen_attention"),
    "jagged": (nested(torch.jagged), "varlen_attention"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "no memory of rows"),
    "distributed": (distributed, "to_local"),
    "complex": (lambda x: torch.complex(x, x).conj(), "complex128"),
    "whole numbers": (torch.Tensor.long, "int64"),
    "eight bits": (lambda x: x.to(torch.float8_e4m3fn), "float8"),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8), "quint8"),
    "meta": (lambda x: x.to("meta"), "meta"),
    "list": (torch.Tensor.tolist, "is a list"),
    "nothing": (lambda x: None, "is a NoneType"),
    "another byte order": (array(lambda x: x.astype(">f8")), "array|>f8"),
    "a masked array": (array(lambda x: numpy.ma.masked_array(x, mask=x > 0)), "rray"),
    "two dimensions": (lambda x: x[0, 0], "shape|dimensions"),
    "no dimension": (lambda x: x.sum(), "shape|dimensions"),
    "five dimensions": (lambda x: x[None], "shape|dimensions"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_in_words(make, words, call):
    given = make(random(4, *SHAPE))
    with pytest.raises((TypeError, ValueError), match=words):
        call(Q, K, given)


def test_a_ring_is_of_use_after_a_refusal():
    """What is wrong with a rank's own tensors is not a failure of its group."""
    for make, words in REFUSED.values():
        with pytest.raises((TypeError, ValueError), match=words):
            ring.ring_attention(Q, K, make(random(4, *SHAPE)))
    assert torch.equal(ring.ring_attention(Q, K, K), encke.attention(Q, K, K))


@pytest.mark.parametrize("make", [*REFUSED.values()][:8], ids=[*REFUSED][:8])
def test_gradients_that_cannot_be_read(make):
    given = make[0](random(4, *SHAPE))
    tracked = Q.clone().requires_grad_()
    out = encke.attention(tracked, K, K)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        torch.autograd.grad(out, tracked, given)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 0, 0)])
def test_empty_batches_and_sequences_of_torchs_function(batch, queries, keys):
    q, k = torch.zeros(batch, 4, queries, 3), torch.zeros(batch, 4, keys, 3)
    mask = torch.arange(queries * keys).view(queries, keys) % 3 == 0
    for options in ({}, dict(is_causal=True), dict(attn_mask=mask)):
        assert encke.scaled_dot_product_attention(q, k, k, **options).shape == q.shape


@pytest.mark.parametrize("call", [torch.zeros, lambda *shape: torch.zeros(shape).numpy()])
def test_packed_batches_without_a_document(call):
    q = call(1, 0, 4, 3)
    for packed in (dict(documents=[]), dict(documents=[0, 0]), dict(cu_seqlens=[0, 0])):
        assert encke.attention(q, q, q, causal=True, **packed).shape == q.shape
    assert encke.varlen_attention(q[0], q[0], q[0], [0, 0]).shape == q[0].shape
    rows = call(1, 4, 4, 3)
    with pytest.raises(ValueError, match="the sum of the document lengths is 0"):
        encke.attention(rows, rows, rows, documents=[])


def test_transforms_of_torch_func_reach_every_mask():
    """What a transform wraps is no tensor without memory."""
    v = random(4, *SHAPE)
    for name in ("key_lengths", "sinks", "autocast", "scaled_dot_product_attention"):
        def loss(v, call=CALLS[name]):
            return call(Q, K, v).sin().sum()

        tracked = v.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(tracked), tracked)
        close = dict(rtol=1e-12, atol=1e-12) if name != "autocast" else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(torch.func.grad(loss)(v), wanted, **close)
        torch.testing.assert_close(torch.func.functionalize(loss)(v), loss(v), **close)


def test_empty_heads_of_padded_batches_are_refused():
    q = torch.zeros(2, 5, 0, 3)
    with pytest.raises(ValueError, match="heads is 0"):
        encke.attention(q, q, q, key_lengths=[2, 5])


def test_sequences_of_different_lengths_are_checked_first():
    for name in ("freed", "sparse", "complex", "meta", "list", "nothing", "five dimensions"):
        make, words = REFUSED[name]
        given = make(random(4, *SHAPE[1:]))
        with pytest.raises((TypeError, ValueError), match=words):
            encke.varlen_attention(Q[0], K[0], given, [0, 5, 12])


def test_tensors_of_gpus_are_copied_or_answered_alike(monkeypatch):
    """Without a GPU: what the calls on GPU tensors do with tensors that kernels cannot read."""
    from encke import _encke, _gpu
    from encke.options import find, from_keywords

    def enqueue(found, inputs, results, clears=True):
        return _encke.enqueue(found, inputs, results, 0, clears)

    monkeypatch.setattr(_gpu, "_enqueue", enqueue)
    found = find(tuple(from_keywords({})))
    # The copies are readable, so that the next check is reached.
    across = Q.transpose(2, 3).contiguous().transpose(2, 3)
    for q in (across, negated(Q), torch._efficientzerotensor(SHAPE, dtype=Q.dtype)):
        with pytest.raises(ValueError, match="q is on the cpu, but the call is for a GPU"):
            _gpu.forward(found, q, K, K)
        with pytest.raises(ValueError, match="q is on the cpu, but the call is for a GPU"):
            _gpu.backward(found, q, K, K, (Q, LSE, None, None), K, None)
    with pytest.raises(ValueError, match="has no memory"):
        _gpu.forward(found, freed_in_part(random(4, *SHAPE)), K, K)
    for q, k in ((Q[:0], K[:0]), (Q[:, :0], K), (Q[:, :0], K[:, :0])):
        out, lse, *_ = _gpu.forward(found, q, k, k)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        gradients = _gpu.backward(found, q, k, k, (out, lse, None, None), out, lse)[:3]
        assert all(x.shape == y.shape and not x.any() for x, y in zip(gradients, (q, k, k)))
