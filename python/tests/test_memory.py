"""Inputs and outputs are not copied: checked by their addresses."""

import gc

import numpy
import torch

import encke


def test_inputs_are_read_in_place_and_outputs_are_not_copied(randn):
    q, k, v = randn(2, 32, 4, 8), randn(2, 32, 2, 8), randn(2, 32, 2, 8)
    result = encke.report(q, k, v, causal=True)
    at = result["addresses"]
    assert (at["q"], at["k"], at["v"]) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert (at["out"], at["lse"]) == (result["out"].data_ptr(), result["lse"].data_ptr())
    (rank,) = result["ranks"]
    assert rank["borrowed_bytes"] == q.nbytes + k.nbytes + v.nbytes
    assert torch.equal(result["out"], encke.attention(q, k, v, causal=True))


def test_the_same_for_numpy():
    q, k, v = numpy.random.default_rng(1).standard_normal((3, 1, 16, 2, 8))
    result = encke.report(q, k, v)
    at = result["addresses"]
    assert [at[name] for name in "qkv"] == [x.ctypes.data for x in (q, k, v)]
    assert at["out"] == result["out"].ctypes.data
    assert result["ranks"][0]["borrowed_bytes"] == q.nbytes + k.nbytes + v.nbytes


def test_each_rank_of_a_contiguous_cut_reads_its_own_rows_in_place(randn):
    q, k, v = (randn(1, 32, 2, 8) for _ in range(3))
    result = encke.report(q, k, v, ranks=4)
    assert sum(rank["borrowed_bytes"] for rank in result["ranks"]) == 3 * q.nbytes
    assert result["sent_bytes"] > 0 and "4 ranks" in result["plan"]


def test_memory_is_freed(randn):
    """The resident size is the same after many calls as after a few."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    q, k, v = (randn(1, 2048, 4, 32, requires_grad=True) for _ in range(3))
    options = dict(segment_lengths=[16], dilation_rates=[1])

    def step():
        encke.attention(q, k, v, **options).sum().backward()
        q.grad = k.grad = v.grad = None

    for _ in range(5):
        step()
    gc.collect()
    before = resident()
    for _ in range(24):
        step()
    gc.collect()
    # 24 calls return 24 times 4 tensors of 2 MiB.
    assert resident() - before < 24 * 2**20


def test_reused_memory_does_not_leak_into_results(randn):
    """The next result reuses the memory of a freed one, also if it is mostly zeros."""
    options = dict(segment_lengths=[64], dilation_rates=[4])
    q, k, v, dout = (randn(1, 4096, 2, 32) for _ in range(4))

    def results():
        out, lse = encke.attention(q, k, v, **options, return_lse=True)
        return [out, *encke.attention_backward(q, k, v, dout, out=out, lse=lse, **options)]

    expected = [x.clone() for x in results()]
    for _ in range(3):
        got = results()
        assert all(map(torch.equal, got, expected))
        for x in got:
            x.fill_(7.0)
    arrays = [x.numpy() for x in (q, k, v)]
    for _ in range(3):
        out = encke.attention(*arrays, **options)
        assert numpy.array_equal(out, expected[0].numpy())
        out[:] = 7.0
