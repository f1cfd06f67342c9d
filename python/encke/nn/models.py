"""LongNet as an encoder and a decoder, and a language model of it, with the arguments and parameter
names of fkodom's package.

A model that only generates needs no decoder beside its encoder: a causal
:class:`encke.nn.LongNetEncoder` is the cheaper choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from encke.nn.longnet import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer

# The paper's smallest model (arXiv:2307.02486, section 4.1).
_SEGMENT_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_DILATION_RATES = (1, 2, 4, 6, 12)


class _Layers(nn.Module):
    """Layers under the names of torch's encoder and decoder."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class LongNet(nn.Module):
    """An encoder and a decoder of dilated layers with MAGNETO's gains. ``options`` are those of the
    layers and of :func:`encke.attention`.

    >>> model = LongNet(32, 4, 1, 1, 64, segment_lengths=[8, 16], dilation_rates=[1, 2])
    >>> model(torch.randn(1, 20, 32)).shape
    torch.Size([1, 20, 32])
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Sequence[int] = _SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = _DILATION_RATES,
        dropout: float = 0.0,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_encoder_layers < 1 or num_decoder_layers < 1:
            raise ValueError(
                f"{num_encoder_layers} encoder and {num_decoder_layers} decoder layers; at least "
                "one of each is needed (encke.nn.LongNetEncoder has no decoder)"
            )
        depth = math.log(3 * num_decoder_layers)
        gains = (math.sqrt(depth * math.log(2 * num_encoder_layers) / 3), math.sqrt(depth))
        names = ("activation", "layer_norm_eps")
        options.update(zip(names, arguments))
        options.update(zip(("device", "dtype"), arguments[len(names) :]))
        layer = (
            d_model,
            nhead,
            list(segment_lengths),
            list(dilation_rates),
            dim_feedforward,
            dropout,
        )

        def layers(kind: type[nn.Module], count: int, gain: float) -> _Layers:
            return _Layers([kind(*layer, gamma_init=gain, **options) for _ in range(count)])

        self.encoder = layers(DilatedTransformerEncoderLayer, num_encoder_layers, gains[0])
        self.decoder = layers(DilatedTransformerDecoderLayer, num_decoder_layers, gains[1])

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """The decoder's output, ``[batch, tokens, d_model]`` like ``x``; encoder and decoder both
        read ``x``."""
        memory = x
        for layer in self.encoder.layers:
            memory = layer(memory, is_causal=is_causal)
        for layer in self.decoder.layers:
            x = layer(x, memory, tgt_is_causal=is_causal, memory_is_causal=is_causal)
        return x


class ScaledRotaryEmbedding(nn.Module):
    """xPos (arXiv:2212.10554) of whole rows: every pair of columns is turned by an angle that grows
    with the position, and scaled by a power of the distance from the middle of the sequence."""

    scale: Tensor

    def __init__(self, dim: int, base: float = 512.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rows of {dim} columns; columns are turned in pairs: use an even dim")
        self.base = base
        columns = torch.arange(0, dim, 2)
        self.register_buffer("scale", (columns + 0.4 * dim) / (1.4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        """The turned rows of ``[batch, tokens, dim]``."""
        tokens, pairs = x.shape[1], self.scale.numel()
        dtype = torch.promote_types(x.dtype, torch.float32)
        exact: dict[str, Any] = dict(device=x.device, dtype=dtype)
        position = torch.arange(tokens, **exact)
        distance = (position - (tokens + 1) // 2) / self.base
        scale = self.scale.to(dtype) ** distance[:, None]
        exponent = torch.arange(pairs, **exact) / pairs
        angle = position[:, None] / 10000.0**exponent
        cos, sin = ((f(angle) * scale).to(x.dtype) for f in (torch.cos, torch.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class LongNetLM(nn.Module):
    """A language model: embeddings and their positions, :class:`LongNet`, a norm and logits.

    Positions are xPos around the middle of the sequence, as in fkodom's package: a token's logits
    depend on the length of the sequence, also in a causal model.

    >>> model = LongNetLM(100, 32, 4, 1, 1, 64, segment_lengths=[8, 16], dilation_rates=[1, 2])
    >>> model(torch.randint(0, 100, (1, 20))).shape
    torch.Size([1, 20, 100])
    """

    def __init__(
        self,
        num_tokens: int,
        d_model: int = 768,
        *arguments: Any,
        device: Optional[Any] = None,
        dtype: Optional[torch.dtype] = None,
        **options: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.token_embedding = nn.Embedding(num_tokens, d_model, **factory)
        self.pos_embedding = ScaledRotaryEmbedding(d_model).to(**factory)
        self.long_net = LongNet(d_model, *arguments, **factory, **options)
        eps = options.get("layer_norm_eps", 1e-5)
        self.norm = nn.LayerNorm(d_model, eps=eps, **factory)
        self.out = nn.Linear(d_model, num_tokens, **factory)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """Logits ``[batch, tokens, num_tokens]`` of token numbers ``[batch, tokens]``."""
        x = self.token_embedding(x)
        x = x + self.pos_embedding(x)
        return self.out(self.norm(self.long_net(x, is_causal=is_causal)))
