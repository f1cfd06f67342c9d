"""Holds any ring or context-parallel attention against a dense float64 reference.

.. code-block:: console

    torchrun --standalone --nproc-per-node=2 -m encke.conformance package.module:function

``function(q, k, v, ...)`` gets this rank's rows, ``[batch, rows, heads, dim]``, and returns its
rows of the output, with gradients. It tells by its arguments what it offers: ``causal``, ``window``
``(left, right)``, ``documents`` (lengths), ``sinks`` ``[heads]``, ``softcap``, ``scale``,
``sharding``, ``sizes`` (rows of each rank) and ``group``. Three attributes say more:
``function.shardings`` (default: contiguous, or all three where there is an argument),
``function.dtypes`` (default: all four) and ``function.even = True`` (all ranks need equally many
rows).

The report says of every promise whether it holds, is not offered, or fails: then with the first
wrong element. The reference shares no code with Encke's kernels.
"""

from encke.conformance.promises import PROMISES, Case, Promise
from encke.conformance.reference import attention
from encke.conformance.suite import Offer, Outcome, run

__all__ = ["PROMISES", "Case", "Offer", "Outcome", "Promise", "attention", "run"]
