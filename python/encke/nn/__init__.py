"""Modules with the constructor arguments of existing dilated-attention packages, so that a model
moves over by changing its import. ``docs/migration.md`` lists where results differ and why.

>>> import torch
>>> layer = MultiheadDilatedAttention(64, 4, dilation_rates=[1, 2], segment_lengths=[16, 32])
>>> x = torch.randn(2, 50, 64)
>>> out, weights = layer(x, x, x, is_causal=True)
>>> out.shape, weights
(torch.Size([2, 50, 64]), None)
"""

from encke.nn.attention import DilatedAttention, MultiheadDilatedAttention
from encke.nn.longnet import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNetEncoder,
)
from encke.nn.models import LongNet, LongNetLM, ScaledRotaryEmbedding

__all__ = [
    "DilatedAttention",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "LongNet",
    "LongNetEncoder",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "ScaledRotaryEmbedding",
]
