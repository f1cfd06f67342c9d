"""Holds any attention over processes against its definition, promise by promise.

    python -m encke.conformance module:function --ranks 2
    torchrun --nproc-per-node 4 -m encke.conformance module:function

``function(q, k, v, **options)`` gets this rank's rows ``[batch, rows, heads, dim]`` and returns
this rank's rows of the output. What it offers is read from its signature: an option that it does
not have (causal, window, documents, sinks, scale, group) is not tried, and an option that it
refuses with an error is reported as refused. A function may say how its rows are divided, and which
type it is made for::

    function.sharding = "zigzag"       # or "contiguous" (default), "striped"
    function.dtype = torch.bfloat16    # default: float32

Every promise is tried on the same processes with random inputs. Outputs and gradients are compared
with softmax attention in float64, written down pair by pair, and the first element that is wrong is
named. Nothing here depends on Encke's own kernels.
"""

from encke.conformance.promises import PROMISES, Promise
from encke.conformance.runner import Outcome, check

__all__ = ["PROMISES", "Outcome", "Promise", "check"]
