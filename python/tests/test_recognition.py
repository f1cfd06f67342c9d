"""Masks become the options that show the same pairs, or an error with the pair to blame."""

import random

import numpy
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import encke
import oracle


def visible(tokens, causal=False, window=None, prefix=0, documents=None):
    return oracle.visible(tokens, tokens, causal, window, prefix, documents, None)


def masks(count, seed=0):
    """Random masks of every kind."""
    choose = random.Random(seed)
    for _ in range(count):
        tokens = choose.randint(1, 14)
        side = lambda: choose.choice([None, choose.randint(0, 15)])  # noqa: E731
        options = dict(causal=choose.random() < 0.5, window=(side(), side()))
        options["prefix"] = choose.choice([0, 0, choose.randint(0, 8)])
        if choose.random() < 0.5:
            cuts = sorted(choose.randint(0, tokens) for _ in range(choose.randint(0, 3)))
            bounds = [0, *cuts, tokens]
            options["documents"] = [end - begin for begin, end in zip(bounds, bounds[1:])]
        yield tokens, options


def test_every_mask_of_the_options_is_recognised():
    for tokens, options in masks(1500):
        mask = visible(tokens, **options)
        found = encke.pattern_of(mask)
        assert torch.equal(visible(tokens, **found), mask), (tokens, options, found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(window=(3, 2)),
        dict(causal=True, window=(4, None)),
        dict(causal=True, window=(2, None), prefix=3),
        dict(window=(2, 1), prefix=2),
        dict(documents=[5, 7, 8]),
        dict(causal=True, window=(2, None), prefix=1, documents=[9, 4, 7]),
    ],
    ids=str,
)
def test_the_options_are_the_simplest(options):
    assert encke.pattern_of(visible(20, **options)) == options
    assert encke.pattern_of(visible(20, **options).numpy()) == options


def test_attention_with_the_options_equals_torch_attention_with_the_mask(randn):
    for tokens, options in masks(40, seed=1):
        mask = visible(tokens, **options)
        q, k, v = (randn(2, tokens, 2, 4) for _ in range(3))
        expected = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
        )
        got = encke.attention(q, k, v, **encke.pattern_of(mask))
        assert_close(got, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        (dict(causal=True), [(10, 20), (0, 2), (12, 12)]),
        (dict(window=(4, 3)), [(10, 20), (12, 16), (15, 10), (17, 14), (23, 0)]),
        (dict(causal=True, window=(5, None), prefix=2), [(10, 20), (12, 13), (15, 9), (17, 14)]),
        (dict(causal=True, documents=[8, 12, 4]), [(10, 20), (12, 15), (21, 3), (17, 17)]),
    ],
    ids=str,
)
def test_a_changed_pair_is_named(options, pairs):
    mask = visible(24, **options)
    for pair in pairs:
        changed = mask.clone()
        changed[pair] = ~changed[pair]
        with pytest.raises(encke.MaskError) as raised:
            encke.pattern_of(changed)
        assert raised.value.pair == pair, (pair, str(raised.value))
        assert f"query {pair[0]}" in str(raised.value) and f"key {pair[1]}" in str(raised.value)
        assert ("does not see" in str(raised.value)) == bool(mask[pair])


def test_the_pair_is_the_first_at_which_no_pattern_goes_on():
    """A causal mask may hide key 9 from query 15, by a window of 5 and a prefix of 9 tokens; but
    then it hides it from query 16, too."""
    mask = visible(24, causal=True)
    mask[15, 9] = False
    with pytest.raises(encke.MaskError, match="query 16 sees key 9.*prefix=9, hides"):
        encke.pattern_of(mask)


def test_random_changes_are_never_recognised_as_something_else():
    choose = random.Random(7)
    refused = 0
    for tokens, options in masks(400, seed=2):
        mask = visible(tokens, **options)
        pair = choose.randrange(tokens), choose.randrange(tokens)
        mask[pair] = ~mask[pair]
        try:
            found = encke.pattern_of(mask)
        except encke.MaskError as error:
            refused += 1
            query, key = error.pair
            assert 0 <= query < tokens and 0 <= key < tokens
        else:
            assert torch.equal(visible(tokens, **found), mask)
    assert refused > 200


@pytest.mark.parametrize(
    "options", [dict(causal=True), dict(window=(2, 2)), dict(documents=[5, 9])], ids=str
)
def test_batches_that_differ_by_their_lengths(options):
    lengths = [9, 0, 14, 3]
    mask = visible(14, **options).repeat(4, 1, 1)
    for entry, length in enumerate(lengths):
        mask[entry, length:] = False
        mask[entry, :, length:] = False
    for given in (mask, mask[:, None]):
        assert encke.pattern_of(given) == dict(options, key_lengths=lengths)
    # Entries of one length, all shorter than the tokens.
    same = mask[:1].expand(3, -1, -1)
    found = encke.pattern_of(same)
    assert found["key_lengths"] == [9, 9, 9]
    without = {name: x for name, x in found.items() if name != "key_lengths"}
    assert torch.equal(visible(14, **without)[:9, :9], same[0, :9, :9])
    # Equal entries need no lengths.
    assert encke.pattern_of(visible(14, **options).expand(4, 1, 14, 14)) == options
    mask[2, 6, 11] = ~mask[2, 6, 11]
    with pytest.raises(encke.MaskError, match="entry . of the batch") as raised:
        encke.pattern_of(mask)
    assert len(raised.value.pair) == 3


def test_masks_of_some_queries_are_recognised():
    choose = random.Random(3)
    for tokens, options in masks(1500, seed=4):
        queries = choose.randint(1, tokens)
        offset = choose.choice([tokens - queries, choose.randint(0, tokens - queries)])
        whole = visible(tokens, **options)
        mask = whole[offset : offset + queries]
        found = encke.pattern_of(mask)
        given = {"causal": False, "window": None, "prefix": 0, "documents": None, **found}
        given.setdefault("query_offset", None)
        got = oracle.visible(tokens, queries, **given)
        assert torch.equal(got, mask), (tokens, queries, offset, options, found)


def test_options_of_some_queries():
    causal = visible(40, causal=True)
    assert encke.pattern_of(causal[33:]) == dict(causal=True)
    assert encke.pattern_of(causal[20:27]) == dict(causal=True, query_offset=20)
    packed = visible(40, causal=True, documents=[10, 22, 8], window=(4, None), prefix=1)
    found = encke.pattern_of(packed[15:])
    assert found == dict(causal=True, documents=[10, 22, 8], window=(4, None), prefix=1)
    assert encke.pattern_of(causal[33:].expand(3, 1, 7, 40)) == dict(causal=True)
    changed = causal[20:27].clone()
    changed[3, 30] = True
    with pytest.raises(encke.MaskError) as raised:
        encke.pattern_of(changed)
    assert raised.value.pair == (3, 30)
    with pytest.raises(encke.MaskError) as raised:
        encke.pattern_of(torch.stack([causal[20:27], changed]))
    assert raised.value.pair == (3, 30)


def test_what_is_no_mask_is_refused():
    with pytest.raises(TypeError, match="float32"):
        encke.pattern_of(numpy.zeros((4, 4), dtype=numpy.float32))
    with pytest.raises(ValueError, match=r"\[5, 4\].*at most as many"):
        encke.pattern_of(torch.ones(5, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[2, 3, 4, 4\]"):
        encke.pattern_of(torch.ones(2, 3, 4, 4, dtype=torch.bool))
    with pytest.raises(encke.MaskError, match="query 0 does not see key 0"):
        encke.pattern_of(torch.zeros(4, 4, dtype=torch.bool))
