"""The cache of requests that all ranks of a group have agreed on."""

from __future__ import annotations

from typing import Any

from encke.options import Options

# Limits of the cache.
_MAX_LASTING = 1024
_MAX_PACKED = 32


class AgreedRequests:
    """Shards and rings by the requests that all ranks have agreed on.

    All ranks make the same calls in the same order, so that their caches hold the same requests.
    Those of packed documents and of a seed are fewer: the next batch mostly has others.
    """

    def __init__(self) -> None:
        self._lasting: dict[Any, Any] = {}
        self._packed: dict[Any, Any] = {}

    def get(self, options: Options, key: Any) -> Any:
        """What was put, unless it was dropped."""
        return self._of(options).get(key)

    def put(self, options: Options, key: Any, value: Any) -> None:
        """Caches a shard or a ring with these options."""
        of = self._of(options)
        if of is self._packed:
            for oldest in list(of)[: 1 - _MAX_PACKED]:
                del of[oldest]
        elif len(of) >= _MAX_LASTING:
            of.clear()
        of[key] = value

    def _of(self, options: Options) -> dict[Any, Any]:
        # Seed 0 stands for all seeds, too (`_ring.shard_of`).
        lasting = options.documents is None and not options.seed
        return self._lasting if lasting else self._packed
