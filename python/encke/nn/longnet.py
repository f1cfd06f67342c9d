"""LongNet's encoder layer, and a stack of them.

The layer is MAGNETO's: a layer norm at the beginning and one in the middle of each block. It has
residual connections, as in the paper; the packages this replaces have none, as with
``residual=False``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encke.nn.attention import MultiheadDilatedAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class DilatedTransformerEncoderLayer(nn.Module):
    """An encoder layer with dilated attention; causal, it is a decoder-only layer.

    ``dropout`` is applied after the attention and in the feed-forward block, not to the attention
    weights. ``options`` are those of :class:`encke.nn.MultiheadDilatedAttention`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Optional[Sequence[int]] = None,
        dilation_rates: Optional[Sequence[int]] = None,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Union[str, Callable[[Tensor], Tensor]] = F.relu,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Optional[Union[torch.device, str]] = None,
        dtype: Optional[torch.dtype] = None,
        *,
        residual: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            if activation not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise ValueError(f"activation is {activation!r}; known: {known}, or a function")
            activation = _ACTIVATIONS[activation]
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.activation = activation
        self.residual = residual
        self.gamma_init = gamma_init
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)
        self.self_attn = MultiheadDilatedAttention(
            d_model,
            nhead,
            dilation_rates,
            segment_lengths,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            **factory,
            **options,
        )
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.norm3 = nn.LayerNorm(dim_feedforward, eps=layer_norm_eps, **factory)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the feed-forward block as MAGNETO does; the attention initialises itself."""
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_normal_(linear.weight, gain=self.gamma_init)
            nn.init.zeros_(linear.bias)

    def forward(self, src: Tensor, is_causal: bool = False, **attention_options: Any) -> Tensor:
        """The layer's output, ``[batch, tokens, d_model]`` like ``src``."""
        x = self._add(src, self._attend(self.norm1(src), is_causal, attention_options))
        return self._add(x, self._feed_forward(self.norm2(x)))

    def _add(self, x: Tensor, block: Tensor) -> Tensor:
        return x + block if self.residual else block

    def _attend(self, x: Tensor, is_causal: bool, attention_options: dict[str, Any]) -> Tensor:
        out, _ = self.self_attn(x, x, x, is_causal=is_causal, **attention_options)
        return self.dropout(out)

    def _feed_forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.activation(self.linear1(x)))
        return self.dropout(self.linear2(self.norm3(x)))


class LongNetEncoder(nn.Module):
    """``num_layers`` of :class:`DilatedTransformerEncoderLayer` and a layer norm, with MAGNETO's
    gain for that depth, sqrt(log(2 num_layers))."""

    def __init__(
        self, num_layers: int, d_model: int, nhead: int, *arguments: Any, **options: Any
    ) -> None:
        super().__init__()
        options.setdefault("gamma_init", math.sqrt(math.log(2 * num_layers)))
        self.layers = nn.ModuleList(
            DilatedTransformerEncoderLayer(d_model, nhead, *arguments, **options)
            for _ in range(num_layers)
        )
        factory = {name: options[name] for name in ("device", "dtype") if name in options}
        self.norm = nn.LayerNorm(d_model, eps=options.get("layer_norm_eps", 1e-5), **factory)

    def forward(self, x: Tensor, is_causal: bool = False, **attention_options: Any) -> Tensor:
        """The encoder's output, ``[batch, tokens, d_model]`` like ``x``."""
        for layer in self.layers:
            x = layer(x, is_causal=is_causal, **attention_options)
        return self.norm(x)
