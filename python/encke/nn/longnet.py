"""LongNet's encoder and decoder layers, and a stack of encoder layers.

The layers are MAGNETO's: a layer norm at the beginning and one in the middle of each block, and
residual connections around the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
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


class _MagnetoLayer(nn.Module):
    """What encoder and decoder layers share: arguments, the feed-forward block, residuals."""

    # The norms of the feed-forward block, by the names of fkodom's package.
    norm_before_linear: str
    norm_between_linear: str

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
        self.activation = activation
        self.residual = residual
        self.gamma_init = gamma_init
        self.dropout = nn.Dropout(dropout)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        norm = partial(nn.LayerNorm, eps=layer_norm_eps, **factory)
        heads = (d_model, nhead, dilation_rates, segment_lengths)
        options.update(factory, layer_norm_eps=layer_norm_eps, gamma_init=gamma_init)
        self.norm1 = norm(d_model)
        self._add_attention(partial(norm, d_model), partial(_attention, heads, options))
        setattr(self, self.norm_before_linear, norm(d_model))
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        setattr(self, self.norm_between_linear, norm(dim_feedforward))
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.reset_parameters()

    def _add_attention(
        self, norm: Callable[[], nn.Module], attention: Callable[..., MultiheadDilatedAttention]
    ) -> None:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialises the feed-forward block as MAGNETO does; the attention initialises itself."""
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_normal_(linear.weight, gain=self.gamma_init)
            nn.init.zeros_(linear.bias)

    def _add(self, x: Tensor, block: Tensor) -> Tensor:
        return x + block if self.residual else block

    def _feed_forward(self, x: Tensor) -> Tensor:
        x = getattr(self, self.norm_before_linear)(x)
        x = self.dropout(self.activation(self.linear1(x)))
        return self.dropout(self.linear2(getattr(self, self.norm_between_linear)(x)))


def _attention(
    heads: tuple[Any, ...], options: dict[str, Any], layer_norm: bool
) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(*heads, layer_norm=layer_norm, **options)


class DilatedTransformerEncoderLayer(_MagnetoLayer):
    """An encoder layer with dilated attention; causal, it is a decoder-only layer.

    ``dropout`` is applied after the attention and in the feed-forward block, not to the attention
    weights; ``residual=False`` leaves the residual connections out. ``options`` are those of
    :class:`encke.nn.MultiheadDilatedAttention`.
    """

    norm_before_linear, norm_between_linear = "norm2", "norm3"

    def _add_attention(
        self, norm: Callable[[], nn.Module], attention: Callable[..., MultiheadDilatedAttention]
    ) -> None:
        self.self_attn = attention(layer_norm=True)

    def forward(self, src: Tensor, is_causal: bool = False, **attention_options: Any) -> Tensor:
        """The layer's output, ``[batch, tokens, d_model]`` like ``src``."""
        attended, _ = self.self_attn(self.norm1(src), is_causal=is_causal, **attention_options)
        x = self._add(src, self.dropout(attended))
        return self._add(x, self._feed_forward(x))


class DilatedTransformerDecoderLayer(_MagnetoLayer):
    """A decoder layer: dilated attention to itself, then to the encoder's output, which has as many
    tokens. Arguments as for :class:`DilatedTransformerEncoderLayer`."""

    norm_before_linear, norm_between_linear = "norm3", "norm4"

    def _add_attention(
        self, norm: Callable[[], nn.Module], attention: Callable[..., MultiheadDilatedAttention]
    ) -> None:
        self.self_attn = attention(layer_norm=False)
        self.norm2 = norm()
        self.multihead_attn = attention(layer_norm=True)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        **attention_options: Any,
    ) -> Tensor:
        """The layer's output, ``[batch, tokens, d_model]`` like ``tgt``."""
        normed = self.norm1(tgt)
        attended, _ = self.self_attn(normed, is_causal=tgt_is_causal, **attention_options)
        x = self._add(tgt, self.dropout(attended))
        crossed, _ = self.multihead_attn(
            self.norm2(x), memory, memory, is_causal=memory_is_causal, **attention_options
        )
        x = self._add(x, self.dropout(crossed))
        return self._add(x, self._feed_forward(x))


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
