"""Wrong rings for test_conformance.py: each with the promise that must be seen to fail.

The right one here gathers all keys, which any of these mistakes could be made in. Run by every
process of a launch; not a test by itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from encke.conformance import PROMISES, Offer, reference, run
from encke.distributed import shard, unshard

torch.set_num_threads(1)


class Gathered(torch.autograd.Function):
    """The rows of all ranks; their gradients are added up."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.contiguous()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def gathered(q, k, v, mistake=None, **options):
    """Attention of contiguous rows over keys from all ranks, with a mistake."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [Gathered.apply(x.contiguous()) for x in (q, k, v)]
    if mistake == "own keys get no other gradient":
        own = slice(rank * k.shape[1], (rank + 1) * k.shape[1])
        whole[1:] = [x.detach() for x in whole[1:]]
        for to, own_rows in zip(whole[1:], (k, v)):
            to[:, own] = own_rows
    if mistake == "documents see each other":
        options.pop("documents", None)
    if mistake == "a window is one too long" and options.get("window"):
        left, right = options["window"]
        options["window"] = (left + 1, right)
    if mistake == "heads share in turns":
        times = q.shape[2] // k.shape[2]
        whole[1:] = [x.repeat(1, 1, times, 1) for x in whole[1:]]
    if mistake == "the scale is ignored":
        options.pop("scale", None)
    if mistake == "sinks have no gradient" and options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach()
    if mistake == "softcap is ignored":
        options.pop("softcap", None)
    if mistake == "large scores overflow":
        whole[0] = whole[0].clamp(-20, 20)
    out = reference.attention(*whole, **options)
    if mistake == "noise":
        out = out + torch.randn((), dtype=out.dtype) * 1e-6
    return out.chunk(ranks, 1)[rank]


def wrong(mistake):
    """A function with a mistake, which offers all but other lengths and shardings."""

    def function(
        q, k, v, *, causal=False, window=None, documents=None, sinks=None, softcap=None, scale=None
    ):
        return gathered(
            q, k, v, mistake, causal=causal, window=window, documents=documents, sinks=sinks,
            softcap=softcap, scale=scale,
        )

    function.even = True
    function.dtypes = ("float32",)
    return function


def means(q, k, v, *, causal=False):
    """The mean of the ranks' attentions, as if every lse were 0."""
    keys, values = (Gathered.apply(x.contiguous()) for x in (k, v))
    parts = zip(keys.chunk(dist.get_world_size(), 1), values.chunk(dist.get_world_size(), 1))
    return torch.stack([reference.attention(q, a, b) for a, b in parts]).mean(0)


def zigzag_is_contiguous(q, k, v, *, causal=False, sharding="contiguous"):
    return gathered(q, k, v, causal=causal)


def rows_are_cut_off(q, k, v):
    """As many rows as the smallest rank has."""
    rows = torch.tensor(q.shape[1])
    dist.all_reduce(rows, dist.ReduceOp.MIN)
    out = gathered(*(x[:, :rows] for x in (q, k, v)))
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - rows.item()))


def gradients_in_half(q, k, v, *, causal=False):
    """dq goes through bfloat16."""
    return gathered(Halved.apply(q), k, v, causal=causal)


class Halved(torch.autograd.Function):
    """The identity, whose gradient is rounded."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


for of in (means, zigzag_is_contiguous, gradients_in_half):
    of.even = True

MISTAKES = {
    "own keys get no other gradient": "gradients",
    "documents see each other": "documents",
    "a window is one too long": "windows",
    "heads share in turns": "grouped heads",
    "the scale is ignored": "scale",
    "sinks have no gradient": "sinks",
    "softcap is ignored": "softcap",
    "large scores overflow": "large scores",
    "noise": "determinism",
}
FUNCTIONS = {
    means: "forward",
    zigzag_is_contiguous: "shardings",
    rows_are_cut_off: "lengths",
    gradients_in_half: "gradients",
}


def outcomes(function, names=None):
    chosen = [of for of in PROMISES if names is None or of.name in names]
    return {of.promise: of for of in run(Offer.of(function), chosen)}


def main():
    dist.init_process_group("gloo")
    if "right" in sys.argv:
        found = outcomes(wrong(None))
        verdicts = {name: of.verdict for name, of in found.items()}
        assert verdicts.pop("lengths") == "not offered", verdicts
        assert set(verdicts.values()) == {"holds"}, found
    for mistake, promise in MISTAKES.items():
        found = outcomes(wrong(mistake), [promise, "forward"])
        assert found[promise].verdict == "fails", (mistake, found[promise])
        if mistake != "noise":
            assert found["forward"].verdict == "holds", (mistake, found["forward"])
    for function, promise in FUNCTIONS.items():
        found = outcomes(function, [promise])[promise]
        assert found.verdict == "fails" and "token" in found.text, (function.__name__, found)
    raises = outcomes(lambda q, k, v: q.nothing, ["forward", "gradients"])
    assert [of.verdict for of in raises.values()] == ["raises", "raises"], raises
    local = torch.arange(6.0).reshape(1, 6, 1, 1)
    assert torch.equal(unshard(shard(local)), local)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
