"""torch's ``scaled_dot_product_attention``, with its signature and layout, computed by Encke."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional

from encke._unusual import refuse_unusual
from encke.functional import attention
from encke.recognition import MaskError, pattern_of

if TYPE_CHECKING:
    from torch import Tensor


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """:func:`torch.nn.functional.scaled_dot_product_attention`: ``query`` is ``[..., heads,
    queries, dim]``, ``key`` ``[..., heads, tokens, dim]``, ``value`` ``[..., heads, tokens,
    value_dim]``.

    A mask must be a pattern that :func:`encke.pattern_of` recognises (boolean, or 0 and minus
    infinity), equal for all heads; any other is an :class:`encke.MaskError` that names the first
    pair. ``is_causal`` counts queries and keys from the first one on, as torch does. Queries that
    see no key get 0.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 4, 16, 8, dtype=torch.float64) for _ in range(3))
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, expected)
    True
    """
    import torch

    q, k, v = query, key, value
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
        if tensor.dim() < 2 or tensor.dim() != q.dim():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and query {list(q.shape)}; all must have "
                "the same number of dimensions, [..., heads, tokens, dim]"
            )
    if not torch.compiler.is_compiling():
        refuse_unusual(query=query, key=key, value=value)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are both given; give one of them")
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))) if q.dim() > 2 else ()
    q, k, v = _with_heads(*(_rows(x, lead) for x in (q, k, v)), enable_gqa)
    masks = _masks(attn_mask, lead, q.shape[2], q, k)
    options = dict(scale=scale, dropout=dropout_p, **masks)
    out = _causal(q, k, v, options) if is_causal else _free(q, k, v, options)
    out = out.transpose(1, 2)
    return out.reshape(*lead, *out.shape[1:]) if query.dim() > 2 else out[0, 0]


def _rows(x: Any, lead: Any) -> Any:
    """``[batch, tokens, heads, dim]``."""
    if x.dim() == 2:
        x = x[None]
    x = x.expand(*lead, *x.shape[-3:])
    return x.reshape(math.prod(lead), *x.shape[-3:]).transpose(1, 2)


def _with_heads(q: Any, k: Any, v: Any, grouped: bool) -> tuple[Any, Any, Any]:
    """With as many heads of values as of keys, and as many of queries or a multiple of them."""
    of_query, of_key, of_value = (x.shape[2] for x in (q, k, v))
    most = max(of_query, of_key, of_value)
    if grouped:
        fitting = all(count and of_query % count == 0 for count in (of_key, of_value))
        advice = "with enable_gqa those of query must be a multiple of the others"
    else:
        fitting = all(count in (1, most) for count in (of_query, of_key, of_value))
        advice = "give enable_gqa=True to share the heads of keys"
    if not fitting:
        raise ValueError(
            f"the heads of query, key and value are {of_query}, {of_key} and {of_value}; {advice}"
        )
    if of_key != of_value:
        k, v = (_repeated(x, most // x.shape[2]) for x in (k, v))
    return q.expand(-1, -1, max(of_query, k.shape[2]), -1), k, v


def _repeated(x: Any, times: int) -> Any:
    """Each head so many times, without a copy where there is one head, or one time."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


def _causal(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Query i sees the keys up to i; queries after the last key see all."""
    import torch

    queries, keys = q.shape[1], k.shape[1]
    if queries <= keys:
        return attention(q, k, v, causal=True, query_offset=0, **options)
    first = attention(q[:, :keys], k, v, causal=True, **options)
    return torch.cat([first, _free(q[:, keys:], k, v, options)], 1)


def _free(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    if q.shape[1] <= k.shape[1] or not k.shape[1]:
        return attention(q, k, v, **options)
    from encke.integrations.pieces import free_attention

    return free_attention(q, k, v, **options)


def _masks(mask: Any, lead: Any, heads: int, q: Any, k: Any) -> dict[str, Any]:
    """The options that show the pairs of a mask."""
    import torch

    if mask is None:
        return {}
    if torch.jit.is_tracing():
        raise MaskError(
            "attn_mask is recognised once, while torch.jit.trace records the call, and would be "
            "that of every later one; use encke.attention with its options",
            (),
        )
    if mask.requires_grad:
        raise MaskError(
            "attn_mask is learned, a bias of each pair's score, whose gradient would be lost; "
            "torch's own function takes it",
            (),
        )
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask == -float("inf"))).all()):
            raise MaskError(
                "attn_mask adds other numbers than 0 and minus infinity to the scores; Encke has "
                "masks and ALiBi slopes (encke.attention), and torch's own function takes any",
                (),
            )
        mask = shown
    pairs = (q.shape[1], k.shape[1])
    if bool(mask.all()):
        return {}
    mask = mask.expand(*lead, heads, *pairs).reshape(math.prod(lead), heads, *pairs)
    if not mask.numel():
        return {}
    if not bool((mask == mask[:, :1]).all()):
        raise MaskError("attn_mask differs between heads; Encke's masks are equal for all", ())
    if pairs[0] > pairs[1]:
        raise MaskError(
            f"attn_mask has {pairs[0]} queries and {pairs[1]} keys; Encke's masks need at most as "
            "many queries as keys",
            (),
        )
    return pattern_of(mask[:, :1])
