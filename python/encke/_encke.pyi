"""The extension module: bindings of the Rust library."""

from collections.abc import Sequence
from typing import Any, Optional

__version__: str

class RingError(RuntimeError):
    """A rank, its device or an exchange failed while a call was under way."""

class ArrayMemory:
    """The memory of a NumPy array: its base object."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class Attention:
    """Attention with fixed settings; plans and buffers are cached between calls."""

    def __new__(cls, options: dict[str, Any]) -> Attention: ...
    @property
    def splits_slots(self) -> bool: ...
    @property
    def mixes(self) -> bool: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def recomputes(self) -> bool: ...
    @property
    def precision(self) -> Optional[str]: ...
    def slots(self, heads: int) -> int: ...
    def delta_slots(self, heads: int) -> int: ...
    def forward(
        self, q: Any, k: Any, v: Any, sinks: Optional[Sequence[float]] = None
    ) -> tuple[Any, Any, Any, Any]: ...
    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        saved: Sequence[Optional[Any]],
        dout: Any,
        dlse: Optional[Any],
        sinks: Optional[Sequence[float]] = None,
    ) -> tuple[Any, Any, Any, Optional[list[float]]]: ...
    def report(self, q: Any, k: Any, v: Any) -> dict[str, Any]: ...
    def explain(self, shape: tuple[int, int, int, int, int], dtype: str, backward: bool) -> str: ...
    def visible(
        self, sizes: tuple[int, ...], row: int
    ) -> tuple[int, list[list[tuple[int, int, int]]]]: ...
    def phantoms(self, sizes: tuple[int, ...]) -> Optional[bytes]: ...
    @property
    def library_seconds(self) -> float: ...

def command(arguments: list[str]) -> int: ...
def enqueue(
    attention: Attention,
    inputs: Sequence[Optional[Any]],
    outputs: Sequence[Any],
    stream: int,
    clears: bool = True,
) -> int: ...

class Shard:
    """One rank of a ring over processes; plans and buffers are cached between calls."""

    def __new__(cls, options: dict[str, Any], rank: int) -> Shard: ...
    @property
    def splits_slots(self) -> bool: ...
    @property
    def recomputes(self) -> bool: ...
    @property
    def borrowed_bytes(self) -> int: ...
    def check(self, shape: tuple[int, int, int, int, int], dtype_name: str) -> None: ...
    def phantoms(self, sizes: tuple[int, ...], dtype_name: str) -> Optional[bytes]: ...
    def forward(
        self,
        tokens: int,
        q: Any,
        k: Any,
        v: Any,
        wire: Any,
        sinks: Optional[Sequence[float]] = None,
    ) -> tuple[Any, Any, Any, Any]: ...
    def backward(
        self,
        tokens: int,
        q: Any,
        k: Any,
        v: Any,
        saved: Sequence[Optional[Any]],
        dout: Any,
        dlse: Optional[Any],
        wire: Any,
        sinks: Optional[Sequence[float]] = None,
    ) -> tuple[Any, Any, Any, Optional[list[float]]]: ...
    def planned(
        self, shape: tuple[int, int, int, int, int], dtype_name: str, backward: bool
    ) -> tuple[int, int]: ...

def add_terms(out: Any, lse: Any, terms: Any, stream: int) -> None: ...
def start_deltas(deltas: tuple[Optional[Any], ...], out: Any, stream: int) -> None: ...
def add_delta(
    attention: Attention,
    branch: int,
    deltas: tuple[Optional[Any], ...],
    own: Optional[tuple[Any, Any, Optional[Any]]],
    stream: int,
) -> None: ...
def enqueue_shard(
    shard: Shard,
    tokens: int,
    inputs: Sequence[Optional[Any]],
    outputs: Sequence[Any],
    stream: int,
    wire: Any,
) -> None: ...
def runs(sharding: Any, ranks: int, tokens: int, rank: int) -> list[tuple[int, int, int]]: ...
def balanced(options: dict[str, Any], ranks: int, tokens: int, heads: int) -> list[int]: ...
def by_document(
    documents: Any, ranks: int, tokens: int
) -> list[list[tuple[int, int]]]: ...
def use_threads(threads: int) -> bool: ...
