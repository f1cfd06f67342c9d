"""Automatic ranks and sharding: the same results, within the memory limit."""

import re

import pytest
import torch

import encke


@pytest.mark.parametrize(
    "open_",
    [dict(ranks="auto"), dict(sharding="auto", ranks=2), dict(ranks="auto", sharding="auto")],
    ids=str,
)
def test_auto_does_not_change_results(randn, open_):
    q, k, v = (randn(1, 96, 4, 8, requires_grad=True) for _ in range(3))
    expected = encke.attention(q, k, v, causal=True)
    got = encke.attention(q, k, v, causal=True, **open_)
    torch.testing.assert_close(got, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, expected))):
        torch.testing.assert_close(a, b)


def test_a_memory_limit_takes_more_ranks():
    shape = dict(tokens=1 << 16, heads=8, dim=64)

    def ranks(**limit):
        text = encke.explain(**shape, ranks="auto", **limit)
        return int(re.search(r"^(\d+) rank", text, re.MULTILINE)[1])

    free = ranks()
    # One rank holds 4 tensors of 128 MiB and its softmax state.
    assert ranks(memory_per_rank=300 << 20) > 1 and free >= 1
    with pytest.raises(ValueError, match="bytes|MiB|GiB"):
        ranks(memory_per_rank=1000)


def test_auto_under_compile(randn):
    q, k, v = (randn(1, 32, 2, 8) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: encke.attention(q, k, v, ranks="auto"), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, k, v), encke.attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ranks="many"), "many"),
        (dict(memory_per_rank=1 << 30), 'ranks="auto"'),
        (dict(ranks=2, memory_per_rank=1 << 30), 'ranks="auto"'),
    ],
)
def test_options_without_effect_are_refused(randn, options, message):
    q = randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match=message):
        encke.attention(q, q, q, **options)
