"""Exact ring and dilated attention, forward and backward, for sequences too long for one device.

:func:`attention` takes tensors of one process: torch tensors on the CPU and on NVIDIA GPUs, and
NumPy arrays, all ``[batch, tokens, heads, dim]``. :mod:`encke.distributed` is for several
processes.

>>> import numpy as np
>>> import encke
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 64, 4, 8)) for _ in range(3))
>>> out = encke.attention(q, k, v, causal=True)
>>> out.shape
(1, 64, 4, 8)

A LongNet pattern, in which every head mixes two branches under one softmax, on a ring of four
ranks. The number of ranks changes results only by rounding:

>>> pattern = dict(segment_lengths=[16, 64], dilation_rates=[1, 4], mode="mix")
>>> ring = encke.attention(q, k, v, **pattern, ranks=4)
>>> bool(np.allclose(ring, encke.attention(q, k, v, **pattern)))
True
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from encke._encke import RingError, __version__
from encke import functional
from encke.functional import (
    attention,
    attention_backward,
    explain,
    report,
    varlen_attention,
)
from encke.heatmaps import attention_columns, attention_rows
from encke.recognition import MaskError, pattern_of
from encke.sdpa import scaled_dot_product_attention

if "torch" in sys.modules:
    # Registers the custom operators before anything that uses them is compiled.
    functional._import_torch()

if TYPE_CHECKING:
    from encke import compat, conformance, distributed, integrations, nn, transformers

# Modules that need torch or another package; imported where they are first used.
_LAZY = ("compat", "conformance", "distributed", "integrations", "nn", "transformers")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"encke.{name}")
    raise AttributeError(f"module 'encke' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "MaskError",
    "RingError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_columns",
    "attention_rows",
    "explain",
    "pattern_of",
    "report",
    "scaled_dot_product_attention",
    "varlen_attention",
]
