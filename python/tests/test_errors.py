"""Invalid calls raise before anything is computed, with the offending values."""

import multiprocessing

import numpy
import pytest
import torch

import encke
from encke import _encke
from encke.options import find, from_keywords


def tensors(shape=(1, 16, 4, 8), count=3, **options):
    return [torch.zeros(shape, **options) for _ in range(count)]


def refused(kind, words, q, k, v, **options):
    with pytest.raises(kind, match=words):
        encke.attention(q, k, v, **options)


def test_shapes():
    q, k, v = tensors()
    refused(ValueError, r"q has 3 dimensions.*k is \[1, 16, 4, 8\].*the batch first", q[0], k, v)
    refused(ValueError, r"q has 2 dimensions.*\[batch, tokens, heads, dim\]", q[0, 0], k, v)
    refused(ValueError, r"v.*\[1, 16, 4, 8\].*\[1, 8, 4, 8\]", q, k[:, :8], v)
    refused(ValueError, "16 queries but only 8 keys", q, k[:, :8], v[:, :8])
    refused(ValueError, r"k.*\[1, 16, 4, 4\].*\[1, 16, 4, 8\]", q, k[..., :4], v)
    refused(ValueError, r"v.*\[1, 16, 2, 8\].*\[1, 16, 4, 8\]", q, k, v[:, :, :2])
    refused(ValueError, "4 query heads cannot be grouped over 3", q, k[:, :, :3], v[:, :, :3])
    refused(ValueError, "head dimension is 0", q[..., :0], k[..., :0], v[..., :0])


def test_types():
    q, k, v = tensors()
    refused(TypeError, "torch.int64; Encke computes", q.long(), k.long(), v.long())
    refused(TypeError, "k.*f64.*f32", q, k.double(), v)
    refused(TypeError, "q is a list", [[1.0]], k, v)
    refused(TypeError, "k is a ndarray|all of one kind", q, k.numpy(), v)
    refused(TypeError, "NumPy array and k a torch tensor", q.numpy(), k, v)
    integers = numpy.zeros((1, 4, 2, 8), dtype=numpy.int32)
    refused(TypeError, "q is of type int32", integers, integers, integers)
    swapped = numpy.zeros((1, 4, 2, 8), dtype=">f8")
    refused(TypeError, "q is of type >f8", swapped, swapped, swapped)
    refused(ValueError, 'unknown element type "f8"', q, k, v, precision="f8")


def test_layouts():
    """What the library does not read as it lies is copied."""
    plain = numpy.random.default_rng(1).standard_normal((1, 16, 4, 8)).astype(numpy.float32)
    wanted = encke.attention(plain, plain, plain)
    backwards = plain[:, ::-1].copy()[:, ::-1]
    assert backwards.strides[1] < 0
    assert numpy.array_equal(encke.attention(backwards, plain, backwards), wanted)
    raw = numpy.zeros(plain.nbytes + 1, dtype=numpy.uint8)
    odd = raw[1:].view(numpy.float32).reshape(plain.shape)
    odd[...] = plain
    assert odd.ctypes.data % 4
    assert numpy.array_equal(encke.attention(odd, odd, odd), wanted)
    across = torch.from_numpy(plain).transpose(2, 3).contiguous().transpose(2, 3)
    assert across.stride(3) == 4
    assert torch.equal(encke.attention(across, across, across), torch.from_numpy(wanted))


def test_devices():
    q, k, v = tensors()
    refused(ValueError, "k is on meta", q, k.to("meta"), v)


def test_options():
    q, k, v = tensors()
    pattern = dict(segment_lengths=[8, 16], dilation_rates=[1, 2])
    refused(ValueError, 'mode="grouped" is unknown; known: "group", "mix"', q, k, v, mode="grouped")
    refused(ValueError, "needs segment_lengths", q, k, v, mode="mix")
    refused(ValueError, "segment_lengths needs dilation_rates", q, k, v, segment_lengths=[8])
    refused(
        ValueError, "2 segment lengths but 1", q, k, v, segment_lengths=[8, 8], dilation_rates=[1]
    )
    refused(ValueError, "only in mix mode", q, k, v, **pattern, offsets="head-mod")
    refused(ValueError, "only for branches in group mode", q, k, v, group_scale="one")
    refused(
        ValueError,
        "5 branches but only 4 heads",
        q,
        k,
        v,
        segment_lengths=[4] * 5,
        dilation_rates=[1] * 5,
    )
    refused(ValueError, "number of ranks is 0", q, k, v, ranks=0)
    refused(ValueError, "is for 2 ranks, but the ring has 3", q, k, v, ranks=3, sharding=[0, 5])
    refused(ValueError, "rank 1 starts at token 17", q, k, v, sharding=[0, 17])
    refused(ValueError, 'sharding="round" is unknown', q, k, v, sharding="round")
    refused(ValueError, "scale is NaN", q, k, v, scale=float("nan"))
    refused(ValueError, "redundancy 2 on 2 ranks", q, k, v, ranks=2, redundancy=2)
    refused(ValueError, "deadline is -1", q, k, v, deadline=-1.0)
    refused(TypeError, "unexpected keyword argument 'casual'", q, k, v, casual=True)
    with pytest.raises(TypeError, match="unknown option 'casual'"):
        encke.explain(tokens=8, heads=1, dim=8, casual=True)


def test_a_deadline_that_passes_is_a_ring_error():
    q, k, v = (torch.randn(1, 4096, 4, 64) for _ in range(3))
    # It passes only if a rank waits at all, which the first ranks mostly do for the last.
    with pytest.raises(encke.RingError, match="rank . failed"):
        for _ in range(100):
            encke.attention(q, k, v, ranks=4, causal=True, sharding="contiguous", deadline=1e-9)
    assert issubclass(encke.RingError, RuntimeError)


def attend_in_child(queue, attend):
    try:
        attend()
        queue.put("computed")
    except (RuntimeError, ValueError) as error:
        queue.put(str(error))


def attend_on_cpu():
    encke.attention(*tensors())


def attend_on_gpu():
    # Without a GPU there are no tensors on one; a process is refused before its tensors are.
    _encke.enqueue(find(tuple(from_keywords({}))), [], [], 0)


@pytest.mark.parametrize("attend", [attend_on_cpu, attend_on_gpu])
def test_a_forked_process_gets_an_error(attend):
    encke.attention(*tensors())
    with pytest.raises(ValueError, match="3 inputs"):
        attend_on_gpu()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=attend_in_child, args=(queue, attend))
    child.start()
    result = queue.get(timeout=30)
    child.join()
    assert "forked" in result and "spawn" in result
