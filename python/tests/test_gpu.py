"""The same on a GPU: values, gradients, pointers, streams and errors of CUDA tensors.

Skipped, with the reason, where torch sees no GPU.
"""

import concurrent.futures
import gc
import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

import encke
import oracle
from encke import _encke
from encke.options import find, from_keywords

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

MIX = dict(segment_lengths=[32, 96], dilation_rates=[1, 3], mode="mix")
GROUP = dict(segment_lengths=[24, 80, 148], dilation_rates=[1, 2, 5])
PATTERNS = {
    "dense": {},
    "causal": dict(causal=True),
    "scaled": dict(scale=0.7),
    "mix": MIX,
    "mix causal": dict(MIX, causal=True),
    "group causal": dict(GROUP, causal=True),
}
RINGS = [
    {},
    dict(ranks=3),
    dict(ranks=4, sharding="zigzag"),
    dict(ranks=2, sharding="striped"),
    dict(ranks=3, queries="replicated"),
]


@pytest.fixture
def on_gpu(randn):
    def make(*shape, requires_grad=False, dtype=torch.float64):
        return randn(*shape).to("cuda", dtype).requires_grad_(requires_grad)

    return make


def expected(q, k, v, **options):
    """By the definition, in float64 on the host."""
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    return wide, oracle.attention(*wide, **options)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern_on_every_ring_forward_and_backward(on_gpu, pattern, ring):
    q = on_gpu(2, 148, 4, 16, requires_grad=True)
    k, v = (on_gpu(2, 148, 2, 16, requires_grad=True) for _ in range(2))
    out, lse = encke.attention(q, k, v, **pattern, **ring, return_lse=True)
    assert out.is_cuda and lse.is_cuda
    wide, (expected_out, expected_lse) = expected(q, k, v, **pattern)
    assert_close(out.cpu(), expected_out, rtol=1e-11, atol=1e-11)
    assert_close(lse.cpu(), expected_lse, rtol=1e-11, atol=1e-11)
    dout = on_gpu(2, 148, 4, 16)
    finite = expected_lse.isfinite()
    loss = (out * dout).sum() + lse[finite.cuda()].sum()
    expected_loss = (expected_out * dout.cpu()).sum() + expected_lse[finite].sum()
    wanted = torch.autograd.grad(expected_loss, wide)
    for got, want in zip(torch.autograd.grad(loss, (q, k, v)), wanted):
        assert_close(got.cpu(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_accurate_as_torch(on_gpu, dtype, dim):
    q = on_gpu(2, 300, 8, dim, dtype=dtype, requires_grad=True)
    k, v = (on_gpu(2, 300, 2, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    dout = on_gpu(2, 300, 8, dim, dtype=dtype)
    out = encke.attention(q, k, v, causal=True)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    wide, (exact, _) = expected(q, k, v, causal=True)
    exact = (exact, *torch.autograd.grad(exact, wide, dout.cpu().double()))
    # torch's attention in the same dtype, head by head.
    host = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    theirs, _ = oracle.attention(*host, causal=True)
    theirs = (theirs, *torch.autograd.grad(theirs, host, dout.cpu()))
    for name, own, other, right in zip(("out", "dq", "dk", "dv"), got, theirs, exact):
        assert own.dtype == dtype
        off, bound = ((x.cpu().double() - right).abs().max() for x in (own, other))
        # In float32 torch on the host and the GPU sum in different orders: eight roundings of the
        # largest element are allowed.
        roundings = 8 if dtype == torch.float32 else 2
        floor = torch.finfo(dtype).eps * right.abs().max()
        assert off <= 2 * bound + roundings * floor, name


@pytest.mark.parametrize("options", [dict(causal=True), MIX], ids=str)
def test_gradcheck(on_gpu, options):
    q = on_gpu(1, 12, 2, 4, requires_grad=True)
    k, v = (on_gpu(1, 12, 1, 4, requires_grad=True) for _ in range(2))
    _, lse = encke.attention(q, k, v, **options, return_lse=True)
    seen = lse.detach().isfinite()

    def call(q, k, v):
        out, lse = encke.attention(q, k, v, **options, return_lse=True)
        return out, lse[seen]

    assert gradcheck(call, (q, k, v))


def test_contiguous_inputs_are_read_in_place_and_others_copied_on_the_gpu(on_gpu):
    found = find(tuple(from_keywords(dict(causal=True))))
    make = lambda: on_gpu(2, 64, 4, 32, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(), make(), make()
    out, lse = torch.empty_like(q), torch.empty(2, 64, 4, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    assert _encke.enqueue(found, (q, k, v), (out, lse), stream) == q.nbytes + k.nbytes + v.nbytes
    assert torch.equal(out, encke.attention(q, k, v, causal=True))
    # A fused projection: three tensors interleaved by row.
    q, k, v = on_gpu(2, 64, 3, 4, 32, dtype=torch.bfloat16).unbind(2)
    assert _encke.enqueue(found, (q, k, v), (out, lse), stream) == 0
    whole = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(out, encke.attention(*whole, causal=True))
    assert _encke.enqueue(found, (whole[0], whole[1], v), (out, lse), stream) == 2 * whole[0].nbytes


def test_calls_are_ordered_with_the_current_stream(on_gpu):
    """Long work before, reuse after: without stream order the results would differ."""
    q, k, v = (on_gpu(1, 2048, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    big = torch.randn(4096, 4096, device="cuda")
    streams = (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream())
    for stream, how in itertools.product(streams, (dict(), dict(ranks=4, sharding="zigzag"))):
        right = encke.attention(q, k, v, causal=True, **how)
        torch.cuda.synchronize()
        for _ in range(5):
            with torch.cuda.stream(stream):
                late = [torch.zeros_like(x) for x in (q, k, v)]
                for _ in range(10):
                    big = big @ big * 1e-4
                for x, ready in zip(late, (q, k, v)):
                    x.copy_(ready)
                out = encke.attention(*late, causal=True, **how)
                for x in late:
                    x.zero_()  # after the call in the order of the stream
                del late, x
                torch.empty_like(q).fill_(7)
                same = (out == right).all()
            stream.synchronize()
            assert bool(same)


def test_memory_is_allocated_and_freed_by_torch(on_gpu):
    q, k, v = (on_gpu(1, 4096, 8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    encke.attention(q, k, v).sum().backward()
    q.grad = k.grad = v.grad = None
    gc.collect()
    before = torch.cuda.memory_allocated()
    out = encke.attention(q, k, v)
    lse_bytes = 4096 * 8 * 4
    assert torch.cuda.memory_allocated() - before == q.nbytes + lse_bytes
    del out
    assert torch.cuda.memory_allocated() == before


def test_compile_and_autocast(on_gpu):
    q, k, v = (on_gpu(1, 64, 2, 32, dtype=torch.float32, requires_grad=True) for _ in range(3))

    def layer(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return encke.attention(q, k, v, causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v).dtype == torch.bfloat16
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
    ours = torch.autograd.grad(compiled(q, k, v).float().sum(), (q, k, v))
    for a, b in zip(ours, torch.autograd.grad(layer(q, k, v).float().sum(), (q, k, v))):
        assert torch.equal(a, b)


def test_recompute_and_another_precision(on_gpu):
    q, k, v = (on_gpu(1, 96, 2, 32, dtype=torch.float32, requires_grad=True) for _ in range(3))
    kept = torch.autograd.grad(encke.attention(q, k, v, causal=True).sum(), (q, k, v))
    again = encke.attention(q, k, v, causal=True, checkpoint="recompute")
    for a, b in zip(kept, torch.autograd.grad(again.sum(), (q, k, v))):
        assert torch.equal(a, b)
    wide = encke.attention(q, k, v, causal=True, precision="f64")
    assert wide.dtype == torch.float64
    _, (exact, _) = expected(q, k, v, causal=True)
    assert_close(wide.cpu(), exact, rtol=1e-11, atol=1e-11)
    assert torch.autograd.grad(wide.sum(), q)[0].dtype == torch.float32


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 8)
    return x


def test_errors(on_gpu):
    q, k, v = (on_gpu(1, 16, 4, 8) for _ in range(3))
    fkodom = dict(segment_lengths=[8], dilation_rates=[1], mode="fkodom")
    for kind, words, tensors, options in [
        (ValueError, "q is on cuda:0 but k is on cpu", (q, k.cpu(), v), {}),
        (ValueError, "q is on cpu but k is on cuda:0", (q.cpu(), k, v), {}),
        (ValueError, r"v.*\[1, 16, 4, 8\]", (q[:, :8], k[:, :8], v), {}),
        (TypeError, "k.*f32.*f64", (q, k.float(), v), {}),
        (ValueError, "has no memory", (freed(q), k, v), {}),
        (ValueError, "on the cpu only", (q, k, v), fkodom),
        (ValueError, "redundancy 1", (q, k, v), dict(ranks=2, redundancy=1)),
    ]:
        with pytest.raises(kind, match=words):
            encke.attention(*tensors, **options)


STRIDED = {
    "heads last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "one element": lambda x: x[..., :1].expand(-1, -1, -1, x.shape[3]),
    "a shared batch": lambda x: x[:1].expand(x.shape[0], -1, -1, -1),
    "lazily negated": lambda x: torch.complex(x, -x).conj().imag,
    "an odd offset": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(9, 0), sinks=[1.0, 0.0])])
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_tensors_of_any_strides(on_gpu, make, options):
    tensors = [make(on_gpu(2, 40, 2, 16)) for _ in range(3)]
    dout = make(on_gpu(2, 40, 2, 16))

    def results(tensors, dout):
        given = [x.detach().requires_grad_() for x in tensors]
        out = encke.attention(*given, **options)
        return out, *torch.autograd.grad(out, given, dout)

    plain = [x.cpu() if torch._is_zerotensor(x) else x.resolve_neg().cpu() for x in tensors]
    wanted = results(plain, dout.cpu())
    for got, want in zip(results(tensors, dout), wanted):
        assert_close(got.cpu(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 8, 8), (2, 0, 8), (2, 0, 0)])
@pytest.mark.parametrize("options", [{}, dict(causal=True, sinks=[0.5, 0.0]), MIX], ids=str)
def test_empty_batches_and_sequences(on_gpu, batch, queries, keys, options):
    q, k, v = (on_gpu(batch, n, 2, 16, requires_grad=True) for n in (queries, keys, keys))
    out, lse = encke.attention(q, k, v, **options, return_lse=True)
    assert out.is_cuda and out.shape == q.shape and lse.shape == q.shape[:3]
    for gradient, x in zip(torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)), (q, k, v)):
        assert gradient.shape == x.shape and not gradient.any()


def test_the_deterministic_backward_repeats_its_bits(on_gpu):
    q, k, v = (on_gpu(1, 1000, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = on_gpu(1, 1000, 4, 64, dtype=torch.bfloat16)

    def gradients(deterministic):
        out = encke.attention(q, k, v, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), dout)

    first, fast = gradients(True), gradients(False)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(True)))
    for a, b in zip(first, fast):
        assert_close(a, b, rtol=2e-2, atol=2e-2)


MASKS = {
    "window": dict(window=(13, 2)),
    "causal window": dict(causal=True, window=(40, 0)),
    "prefix": dict(causal=True, window=(11, 0), prefix=5),
    "documents": dict(documents=[70, 1, 30, 47], causal=True),
    "packed window": dict(cu_seqlens=torch.tensor([0, 101, 148]), window=(20, 7)),
    "softcap": dict(softcap=2.0, causal=True),
    "slopes": dict(alibi_slopes=True, window=(50, 50)),
    "sinks": dict(sinks=torch.tensor([0.5, -1.0, 3.0, -torch.inf]), causal=True),
    "dropout": dict(dropout=0.3, seed=7, causal=True),
    "packed dropout": dict(dropout=0.3, seed=2**64 - 5, documents=[60, 88]),
    "dilated window": dict(MIX, window=(30, 0), softcap=1.5, dropout=0.2, seed=1),
}


def with_gradients(tensors, dout, **options):
    """out, lse, dq, dk, dv, and the gradient of the sinks if there are any."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(inputs[0]).requires_grad_()
    out, lse = encke.attention(*inputs, **options, return_lse=True)
    wanted = [*inputs, *([options["sinks"]] if "sinks" in options else [])]
    loss = (out * dout).sum() + lse[lse.isfinite()].sum()
    return out, lse, *torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_masks_are_those_of_the_cpu(on_gpu, options, ring):
    tensors = on_gpu(2, 148, 4, 16), on_gpu(2, 148, 2, 16), on_gpu(2, 148, 2, 16)
    dout = on_gpu(2, 148, 4, 16)
    got = with_gradients(tensors, dout, **options, **ring)
    want = with_gradients([x.cpu() for x in tensors], dout.cpu(), **options)
    for x, y in zip(got, want):
        assert_close(x.cpu(), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_masks_in_low_precision(on_gpu, options, dim):
    shapes = (1, 148, 4, dim), (1, 148, 2, dim), (1, 148, 2, dim)
    tensors = [on_gpu(*shape, dtype=torch.bfloat16) for shape in shapes]
    dout = on_gpu(1, 148, 4, dim, dtype=torch.bfloat16)
    got = with_gradients(tensors, dout, **options)
    wide = [x.cpu().double() for x in tensors]
    for x, y in zip(got, with_gradients(wide, dout.cpu().double(), **options)):
        seen = y.isfinite()
        assert torch.equal(seen, x.cpu().isfinite())
        off = (x.cpu().double() - y)[seen].norm() / y[seen].norm().clamp_min(1e-3)
        assert off < 1e-2


@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(window=(20, 3), query_offset=50)], ids=str
)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_fewer_queries_and_wider_values(on_gpu, options, ring):
    tensors = on_gpu(1, 21, 4, 8), on_gpu(1, 90, 2, 8), on_gpu(1, 90, 2, 24)
    dout = on_gpu(1, 21, 4, 24)
    got = with_gradients(tensors, dout, **options, **ring)
    want = with_gradients([x.cpu() for x in tensors], dout.cpu(), **options)
    for x, y in zip(got, want):
        assert x.shape == y.shape
        assert_close(x.cpu(), y, rtol=1e-10, atol=1e-10)


def test_padded_batches_and_compiled_masks(on_gpu):
    tensors = on_gpu(2, 60, 4, 16), on_gpu(2, 60, 2, 16), on_gpu(2, 60, 2, 16)
    dout = on_gpu(2, 60, 4, 16)
    options = dict(key_lengths=[33, 60], causal=True, sinks=torch.zeros(4))
    got = with_gradients(tensors, dout, **options)
    want = with_gradients([x.cpu() for x in tensors], dout.cpu(), **options)
    for x, y in zip(got, want):
        assert_close(x.cpu(), y, rtol=1e-10, atol=1e-10)
    masked = dict(window=(9, 0), softcap=3.0, documents=torch.tensor([20, 40]))
    compiled = torch.compile(lambda *x: encke.attention(*x, **masked), fullgraph=True)
    assert_close(compiled(*tensors), encke.attention(*tensors, **masked))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_threads_that_have_asked_cuda_nothing(on_gpu, pattern):
    """They have no context until a call gives them one; torch's cached memory needs none."""
    q = on_gpu(1, 131, 4, 16, dtype=torch.bfloat16)
    kept = [torch.empty_like(q, dtype=of) for of in (q.dtype, torch.float32) for _ in range(12)]
    del kept
    with concurrent.futures.ThreadPoolExecutor(1) as alone:
        out = alone.submit(encke.attention, q, q, q, **pattern).result()
    assert torch.equal(out, encke.attention(q, q, q, **pattern))


@pytest.mark.parametrize("dim", [8, 5, 48, 300], ids="{} wide".format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_sinks_are_added_to_finished_rows(on_gpu, dim, dtype):
    """Also to rows that are no vectors of 16 bytes, and to rows that see no key."""
    q, k, v = (on_gpu(2, 12, 4, dim, dtype=dtype) for _ in range(3))
    sinks = torch.tensor([0.4, -2.0, 5.0, -torch.inf], dtype=torch.float64)
    mask = dict(window=(3, 0), documents=[5, 7])
    got = encke.attention(q, k, v, sinks=sinks.cuda(), return_lse=True, **mask)
    wide = [x.cpu().double() for x in (q, k, v)]
    right = encke.attention(*wide, sinks=sinks, return_lse=True, **mask)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for x, y in zip(got, right):
        assert_close(x.cpu().double(), y, rtol=bound, atol=bound)
