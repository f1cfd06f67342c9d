"""Dilated attention as modules: the plain one without parameters, and the multi-head one.

The decision here: the multi-head module takes its attention as a module, so that the ring over
processes (:class:`encke.distributed.RingDilatedAttention`) needs no second class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

import encke
from encke.masks import rate_of
from encke.options import refuse_two_names, refuse_wrong


class DilatedAttention(nn.Module):
    """:func:`encke.attention` with fixed options; no parameters.

    Arguments are those of the packages with a class of this name. ``options`` are those of
    :func:`encke.attention` (``mode``, ``group_scale``, ``offsets``, ``ranks``, …); without
    ``segment_lengths`` attention is dense. ``attention_dropout`` drops pairs while training, with a
    seed of torch's generator, on the CPU. ``op``, which selected an xFormers kernel, must be None.

    >>> attention = DilatedAttention([16, 32], [1, 2], mode="mix")
    >>> q = torch.randn(1, 40, 4, 8)
    >>> attention(q, q, q, is_causal=True).shape
    torch.Size([1, 40, 4, 8])
    """

    def __init__(
        self,
        segment_lengths: Optional[Sequence[int]] = None,
        dilation_rates: Optional[Sequence[int]] = None,
        softmax_scale: Optional[float] = None,
        attention_dropout: float = 0.0,
        op: None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_two_names(options, dropout="attention_dropout", scale="softmax_scale")
        self.attention_dropout = rate_of(attention_dropout)
        if op is not None:
            raise ValueError(f"op is {op!r}; Encke does not use xFormers kernels: use None")
        self.segment_lengths = segment_lengths
        self.dilation_rates = dilation_rates
        self.softmax_scale = softmax_scale
        self.options = options
        pattern = dict(segment_lengths=segment_lengths, dilation_rates=dilation_rates)
        refuse_wrong(dict(options, **pattern, scale=softmax_scale))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Attention of ``[batch, tokens, heads, dim]``."""
        options = dict(self.options)
        options["causal"] = is_causal or options.get("causal", False)
        return encke.attention(
            query,
            key,
            value,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            **options,
        )

    def extra_repr(self) -> str:
        """The options given."""
        given = dict(
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            softmax_scale=self.softmax_scale,
            attention_dropout=self.attention_dropout or None,
            **self.options,
        )
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


class MultiheadDilatedAttention(nn.Module):
    """Multi-head dilated attention in the MAGNETO form: projections, attention, a layer norm before
    the output projection, and Xavier initialisation with ``gamma_init`` as the gain of the value
    and output projections.

    ``forward(query, key, value, is_causal=False)`` takes ``[batch, tokens, embed_dim]`` and returns
    (output, None), as :class:`torch.nn.MultiheadAttention` without weights does.

    Additional arguments: ``num_kv_heads`` for grouped-query attention, ``attention`` for another
    module instead of :class:`DilatedAttention` (for instance the ring over processes), and
    ``options`` of :func:`encke.attention`. Any head dimension works, and any number of heads that
    is at least the number of branches.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Optional[Sequence[int]] = None,
        segment_lengths: Optional[Sequence[int]] = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Optional[Union[torch.device, str]] = None,
        dtype: Optional[torch.dtype] = None,
        op: None = None,
        *,
        num_kv_heads: Optional[int] = None,
        attention: Optional[nn.Module] = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if heads < 1:
                raise ValueError(f"{name} is {heads}; it must be at least 1")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        if attention is None:
            attention = DilatedAttention(
                segment_lengths, dilation_rates, attention_dropout=dropout, op=op, **options
            )
        elif segment_lengths is not None or dilation_rates is not None or options or dropout:
            raise ValueError("attention is given, which has its own options: leave the others out")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.gamma_init = gamma_init
        factory = dict(device=device, dtype=dtype)
        kv_dim = embed_dim // num_heads * num_kv_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(embed_dim, kv_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(embed_dim, kv_dim, bias=bias, **factory)
        self.attention = attention
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **factory) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as MAGNETO does (arXiv:2210.06423, figure 2). The gain, ``gamma_init``,
        depends on the depth of the model."""
        gains = [
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        ]
        for projection, gain in gains:
            nn.init.xavier_normal_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        is_causal: bool = False,
        **attention_options: Any,
    ) -> tuple[Tensor, None]:
        """(output, None). Key and value default to the query. Other keywords are passed to the
        attention's forward (``sizes``, for the ring)."""
        key = query if key is None else key
        value = key if value is None else value
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, -1))
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, -1))
        x = self.attention(q, k, v, is_causal=is_causal, **attention_options).flatten(-2)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x), None
