"""bits="invariant": every ring has the bits of one rank."""

from __future__ import annotations

import numpy
import pytest
import torch

import encke

CASES = [
    dict(),
    dict(causal=True),
    dict(causal=True, window=(100, 0), prefix=3),
    dict(segment_lengths=[64, 256], dilation_rates=[1, 2], mode="mix", causal=True),
    dict(documents=[100, 412], causal=True),
]


def results(dtype, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 512, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = encke.attention(q, k, v, return_lse=True, **options)
    torch.autograd.backward([out], [dout])
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES)
def test_rings_have_the_bits_of_one_rank(options, dtype):
    options = dict(options, bits="invariant:32")
    alone = results(dtype, **options)
    for ranks in (2, 3, 5, 8):
        ring = results(dtype, ranks=ranks, **options)
        for one, other in zip(alone, ring):
            assert torch.equal(one, other), ranks


def test_planned_bits_are_others():
    alone, ring = (results(torch.float32, ranks=ranks) for ranks in (1, 4))
    assert any(not torch.equal(one, other) for one, other in zip(alone, ring))


def test_a_row_has_the_same_bits_alone():
    q, k, v = numpy.random.default_rng(0).standard_normal((3, 3, 300, 4, 16)).astype("float32")
    given = dict(causal=True, bits="invariant")
    both = encke.attention(q, k, v, **given)
    for entry in range(3):
        one = slice(entry, entry + 1)
        assert numpy.array_equal(encke.attention(q[one], k[one], v[one], **given), both[one])


def test_under_compile():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 256, 2, 8, generator=generator) for _ in range(3))
    given = dict(causal=True, ranks=2, bits="invariant:32")
    compiled = torch.compile(encke.attention, fullgraph=True, backend="aot_eager")
    expected = encke.attention(q, k, v, **dict(given, ranks=1))
    assert torch.equal(compiled(q, k, v, **given), expected)


def test_refusals_name_the_option():
    q = torch.randn(1, 256, 2, 8)
    for options, words in [
        (dict(bits="same"), "bits = same is unknown"),
        (dict(bits="invariant:48"), "48"),
        (dict(bits="invariant", ranks=2, sharding="zigzag"), "contiguous"),
        (dict(bits="invariant", ranks=2, queries="replicated"), "replicated queries"),
        (dict(bits="invariant", sharding=[0, 100]), "before token 100"),
    ]:
        with pytest.raises(ValueError, match=words):
            encke.attention(q, q, q, **options)
