"""Every pair of options of a call: torch and NumPy give what dense attention with the mask written
out gives, or one sentence names both options. Nothing is ignored."""

import itertools

import pytest
import torch

import encke
import oracle

TOKENS, HEADS = 24, 4
BRANCHES = dict(segment_lengths=[8, 24], dilation_rates=[1, 2])
MIX = dict(BRANCHES, mode="mix")

# Options, and words by which a refusal may name them.
OF_CALLS = [
    (dict(causal=True), "causal"),
    (dict(window=(5, 2)), "window"),
    (dict(window=(5, 2), prefix=3), "window prefix"),
    (dict(documents=[14, 0, 1, 9]), "documents"),
    (dict(cu_seqlens=[0, 14, 15, 24]), "documents cu_seqlens"),
    (dict(key_lengths=[24, 11]), "key_lengths"),
    (dict(queries=9), "queries query_offset tokens"),
    (dict(queries=9, query_offset=5), "queries query_offset tokens"),
    (dict(width=6), "value"),
    (dict(kv_heads=2), "heads"),
    (dict(scale=0.3), "scale"),
    (dict(softcap=2.0), "softcap"),
    (dict(alibi_slopes=True), "slopes"),
    (dict(alibi_slopes=[0.5, 0.1, 0.0, -0.1]), "slopes"),
    (dict(sinks=[0.5, -1.0, 2.0, 0.0]), "sinks"),
    (dict(dropout=0.3, seed=2**63 + 1), "dropout"),
    (BRANCHES, "group"),
    (MIX, "mix"),
    (dict(MIX, offsets="head-block"), "mix"),
    # What the oracle does not know is compared with one rank.
    (dict(BRANCHES, group_scale="groups"), "group"),
    (dict(MIX, mixing_gradient="detached"), "detached"),
    (dict(MIX, padding="torchscale"), "padding"),
    (dict(BRANCHES, mode="fkodom"), "fkodom"),
]
OF_RINGS = [
    (dict(ranks=3), "ranks"),
    (dict(ranks="auto"), "auto ranks"),
    (dict(sharding="zigzag"), "sharding contiguous"),
    (dict(sharding="striped"), "sharding contiguous"),
    (dict(sharding=[0, 3, 3, 18]), "sharding partition cut"),
    (dict(sharding="balanced"), "balanced"),
    (dict(sharding="documents"), "balanced contiguous"),
    (dict(sharding="auto"), "auto"),
    (dict(how_queries="replicated"), "replicated"),
    (dict(checkpoint="recompute"), "checkpoint"),
    (dict(redundancy=1), "redundancy"),
    (dict(bits="invariant:32"), "bits"),
    (dict(deterministic=False), "deterministic"),
    (dict(deadline=600.0), "deadline"),
]
OPTIONS = [*OF_CALLS, *OF_RINGS]
RINGS = {name for given, _ in OF_RINGS for name in given}
UNKNOWN = ("group_scale", "mixing_gradient", "padding")
ORACLE = {name for given, _ in OF_CALLS for name in given} - {*UNKNOWN, "cu_seqlens"}
OF_TENSORS = ("queries", "width", "kv_heads")


def pairs():
    alone = [((given, {}), (words, words)) for given, words in OPTIONS]
    both = itertools.combinations(OPTIONS, 2)
    return alone + [
        ((a, b), (words, more)) for (a, words), (b, more) in both if not a.keys() & b.keys()
    ]


def tensors(given):
    """q, k, v and dout. Values are positive, because fkodom divides by their sums."""
    make = torch.Generator().manual_seed(7)
    randn = lambda *shape: torch.randn(2, *shape, 8, generator=make, dtype=torch.float64)
    kv_heads, width = given.get("kv_heads", HEADS), given.get("width", 8)
    q, k = randn(given.get("queries", TOKENS), HEADS), randn(TOKENS, kv_heads)
    v, dout = 1 + randn(TOKENS, kv_heads).tanh() / 2, randn(q.shape[1], HEADS)
    return q, k, v[..., :width], dout[..., :width]


def options_of(given):
    """Options of a call with at least four ranks."""
    options = {name: x for name, x in given.items() if name not in OF_TENSORS}
    if "how_queries" in options:
        options["queries"] = options.pop("how_queries")
    if not isinstance(options.get("sharding"), list):
        options.setdefault("ranks", 4)
    return options


def results(call, q, k, v, dout, sinks=None):
    """out, lse and the gradients."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        sinks = torch.tensor(sinks, dtype=torch.float64, requires_grad=True)
        inputs.append(sinks)
    out, lse = call(*inputs[:3], **({} if sinks is None else dict(sinks=sinks)))
    return [out, lse, *torch.autograd.grad(out, inputs, dout)]


KNOWN = {}


def expected(given, qkv, dout, sinks):
    """What rings do not change is computed once."""
    of_call = {name: x for name, x in given.items() if name not in RINGS}
    key = repr(of_call)
    if key not in KNOWN:
        KNOWN[key] = compute(of_call, qkv, dout, sinks)
    return KNOWN[key]


def compute(given, qkv, dout, sinks):
    if not any(name in UNKNOWN for name in given) and given.get("mode") != "fkodom":
        known = {name: x for name, x in given.items() if name in ORACLE and name not in OF_TENSORS}
        if "cu_seqlens" in given:
            known["documents"] = [14, 1, 9]
        known.pop("sinks", None)
        return results(lambda *x, **s: oracle.attention(*x, **known, **s), *qkv, dout, sinks)
    alone = {name: x for name, x in options_of(given).items() if name not in ("ranks", "sinks")}
    call = lambda *x, **s: encke.attention(*x, **alone, return_lse=True, **s)
    return results(call, *qkv, dout, sinks)


def check(given, words):
    *qkv, dout = tensors(given)
    options = options_of(given)
    sinks = options.pop("sinks", None)
    call = lambda *x, **s: encke.attention(*x, **options, return_lse=True, **s)
    try:
        got = results(call, *qkv, dout, sinks)
    except (ValueError, TypeError) as error:
        said = str(error)
        assert "\n" not in said, said
        for of in words:
            assert any(word in said for word in of.split()), f"{of!r} is not named in: {said}"
        with pytest.raises(type(error)):
            encke.attention(*(x.numpy() for x in qkv), **options, sinks=sinks)
        return False
    for a, b in zip(got, expected(given, qkv, dout, sinks)):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10), (a - b).abs().max()
    if not RINGS & given.keys():
        # NumPy takes the same way from the options on.
        arrays = [x.numpy() for x in qkv]
        out, lse = encke.attention(*arrays, **options, sinks=sinks, return_lse=True)
        assert torch.equal(torch.tensor(out), got[0]) and torch.equal(torch.tensor(lse), got[1])
        back = encke.attention_backward(*arrays, dout.numpy(), **options, sinks=sinks)
        for a, b in zip(back, got[2:]):
            assert torch.allclose(torch.tensor(a), b, rtol=1e-12, atol=1e-12)
    return True


def test_two_options_equal_dense_attention_or_a_sentence_names_both():
    every, wrong, computed = pairs(), [], 0
    assert len(every) > 450
    for (a, b), words in every:
        try:
            computed += check({**a, **b}, words)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{a} {b}: {type(error).__name__} {error}")
    assert not wrong, f"{len(wrong)} pairs:\n" + "\n".join(wrong)
    assert 400 < computed < len(every)


@pytest.mark.parametrize(
    "options",
    [
        dict(documents=[4, 8]),
        dict(key_lengths=[12]),
        dict(dropout=0.5, seed=1, attention_dropout=0.5),
        dict(scale=0.3, softmax_scale=0.2),
    ],
    ids=str,
)
def test_modules_and_varlen_ignore_no_option(options):
    from encke.distributed import RingDilatedAttention
    from encke.nn import DilatedAttention

    q = torch.randn(12, 2, 4)
    if "documents" in options or "key_lengths" in options:
        with pytest.raises(TypeError, match=f"{next(iter(options))} and cu_seqlens"):
            encke.varlen_attention(q, q, q, [0, 12], **options)
        return
    words = " and ".join((list(options)[0], list(options)[-1]))
    for module in (DilatedAttention, RingDilatedAttention):
        with pytest.raises((TypeError, ValueError), match=f"{words}|attention_dropout is 0.5"):
            module([4, 12], [1, 2], **options)
    # One of them alone counts: it is the option of the call.
    with pytest.raises(TypeError, match="scale and softmax_scale"):
        RingDilatedAttention([4, 12], [1, 2], scale=0.3)
