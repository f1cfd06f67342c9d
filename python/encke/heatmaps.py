"""Where attention goes: rows of the softmax, and its column sums.

The forward pass keeps the logarithm of each softmax denominator, the lse, so any row of the
probabilities can be computed afterwards from q, k and lse alone, and column sums need one backward
pass. Memory is proportional to the number of tokens, not to its square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy

from encke import _readable
from encke._unusual import refuse_dimensions, refuse_wrappers
from encke.options import Options, find, from_keywords


Tensor = TypeVar("Tensor")


def attention_rows(
    q: Tensor, k: Tensor, lse: Tensor, rows: Sequence[int], **options: Any
) -> Tensor:
    """The attention probabilities of some queries, ``[batch, len(rows), heads, tokens]``: how much
    of each key's value is in the output of query ``rows[i]``.

    ``q``, ``k``, ``lse`` and the options are those of the call of :func:`encke.attention` that
    returned the lse. The result is float32 (float64 for float64), and its rows sum to 1 if nothing
    else takes part in the softmax (sinks, torchscale's padding). A key that several branches see
    counts several times. Dropout is not applied.

    The share of every tile of a slide in the output of its first token, for each head:

    >>> import torch, encke
    >>> q, k, v = (torch.randn(1, 50, 4, 8) for _ in range(3))
    >>> pattern = dict(segment_lengths=[16, 64], dilation_rates=[1, 4], mode="mix")
    >>> out, lse = encke.attention(q, k, v, **pattern, return_lse=True)
    >>> shares = attention_rows(q, k, lse, [0], **pattern)
    >>> shares.shape
    torch.Size([1, 1, 4, 50])
    >>> torch.allclose(shares[0, 0, 1] @ v[0, :, 1], out[0, 0, 1], atol=1e-5)
    True
    """
    _check(q, k, lse, in_torch=True)
    given, found = _attention(options)
    batch, queries, heads, dim = q.shape
    tokens, kv_heads = k.shape[1:3]
    scale = 1 / math.sqrt(dim) if given.scale is None else given.scale
    module, sums = _library(q)
    shares = _zeros(q, (batch, len(rows), heads, tokens), sums)
    slopes = _slopes(given.alibi_slopes, heads)
    for index, row in enumerate(rows):
        if not 0 <= row < queries:
            raise ValueError(f"rows[{index}] is {row}, but there are {queries} queries")
        position, visible = found.visible((batch, tokens, heads, kv_heads, dim, queries, dim), row)
        for head, runs in enumerate(visible):
            query = _cast(q[:, row, head], sums)
            for first, stride, count in runs:
                end = first + (count - 1) * stride + 1
                keys = _cast(k[:, first:end:stride, head * kv_heads // heads], sums)
                score = scale * (keys * query[:, None]).sum(-1)
                if given.softcap is not None:
                    score = given.softcap * module.tanh(score / given.softcap)
                if slopes is not None:
                    away = numpy.abs(position - numpy.arange(first, end, stride))
                    score = score - _like(slopes[head] * away, q, sums)
                share = module.exp(score - _cast(lse[:, row, head], sums)[:, None])
                shares[:, index, head, first:end:stride] += share
    return shares


def attention_columns(q: Tensor, k: Tensor, lse: Tensor, **options: Any) -> Tensor:
    """The sums of the attention probabilities over all queries, ``[batch, heads, tokens]``: how
    much attention each key gets. Arguments are those of :func:`attention_rows`.

    >>> import numpy as np, encke
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> out, lse = encke.attention(q, k, v, return_lse=True)
    >>> sums = attention_columns(q, k, lse)
    >>> bool(np.allclose(sums.sum(-1), 16))
    True
    """
    _check(q, k, lse, in_torch=False)
    _, found = _attention(options)
    heads, kv_heads = q.shape[2], k.shape[2]
    _, sums = _library(q)
    q, k, lse = _cast(q, sums), _cast(k, sums), _cast(lse, sums)
    if heads != kv_heads:
        # Each query head has columns of its own.
        k = k[:, :, [head * kv_heads // heads for head in range(heads)]]
    # The gradient of v where the upstream gradient is 1 in one feature is the sum of a column.
    # On a GPU values are as wide as keys.
    on_gpu = getattr(q, "is_cuda", False)
    width = q.shape[3] if on_gpu else 1
    v = _zeros(q, (*k.shape[:3], width), sums)
    out, dout = (_zeros(q, (*q.shape[:3], width), sums) for _ in range(2))
    dout[..., 0] = 1.0
    if on_gpu:
        from encke import _torch

        _, _, dv, _ = _torch._backward(found, q, k, v, out, lse, None, None, None, dout, None)
    else:
        saved = (out, lse, None, None)
        _, _, dv, _ = _readable.backward(found, q, k, v, saved, dout, None)
    return dv[..., 0].swapaxes(1, 2)


def _check(q: Any, k: Any, lse: Any, in_torch: bool) -> None:
    refuse_wrappers(in_torch=in_torch, q=q, k=k, lse=lse)
    refuse_dimensions(4, "[batch, tokens, heads, dim]", q=q, k=k)
    refuse_dimensions(3, "[batch, tokens, heads]", lse=lse)


def _attention(options: dict[str, Any]) -> tuple[Options, Any]:
    """The options as given, and the attention whose softmax they describe."""
    given = from_keywords(options)
    if given.mode == "fkodom":
        raise ValueError('mode="fkodom" divides outputs by their sums: they are not softmax rows')
    # What changes outputs or gradients but not the softmax is left out.
    plain = given._replace(mixing_gradient=None, group_scale=None, dropout=0.0, seed=None)
    return given, find(tuple(plain))


def _library(q: Any) -> tuple[Any, Any]:
    """numpy or torch, and the type of sums."""
    if isinstance(q, numpy.ndarray):
        return numpy, numpy.float64 if q.dtype == numpy.float64 else numpy.float32
    import torch

    return torch, torch.float64 if q.dtype == torch.float64 else torch.float32


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if isinstance(x, numpy.ndarray) else x.detach().to(dtype)


def _zeros(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if isinstance(like, numpy.ndarray):
        return numpy.zeros(shape, dtype)
    return like.new_zeros(shape, dtype=dtype)


def _like(values: Any, q: Any, dtype: Any) -> Any:
    return values.astype(dtype) if isinstance(q, numpy.ndarray) else q.new_tensor(values).to(dtype)


def _slopes(given: Any, heads: int) -> Any:
    if given is None or given is False:
        return None
    if given is True:
        return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
    return list(given)


__all__ = ["attention_columns", "attention_rows"]
