"""The extension module: what Python cannot say itself."""

from typing import Any, Optional

__version__: str

class RingError(RuntimeError):
    """A rank, its device or an exchange failed while a call was under way."""

class Memory:
    """The memory of an array: what NumPy keeps as its base."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class Attention:
    """Attention with fixed settings; plans and buffers are kept between calls."""

    def __new__(cls, options: dict[str, Any]) -> Attention: ...
    @property
    def splits_slots(self) -> bool: ...
    @property
    def recomputes(self) -> bool: ...
    @property
    def precision(self) -> Optional[str]: ...
    def slots(self, heads: int) -> int: ...
    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]: ...
    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Optional[Any],
        lse: Optional[Any],
        slot_out: Optional[Any],
        slot_lse: Optional[Any],
        dout: Any,
        dlse: Optional[Any],
    ) -> tuple[Any, Any, Any]: ...
    def report(self, q: Any, k: Any, v: Any) -> dict[str, Any]: ...
    def explain(
        self, shape: tuple[int, int, int, int, int], dtype: str, backward: bool
    ) -> str: ...
    @property
    def library_seconds(self) -> float: ...

def command(words: list[str]) -> int: ...
def forward_gpu(
    attention: Attention, q: Any, k: Any, v: Any, out: Any, lse: Any, stream: int
) -> int: ...
def backward_gpu(
    attention: Attention,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Optional[Any],
    dq: Any,
    dk: Any,
    dv: Any,
    stream: int,
) -> int: ...

class Shard:
    """One rank of a ring over processes; plans and buffers are kept between calls."""

    def __new__(cls, options: dict[str, Any], rank: int) -> Shard: ...
    @property
    def splits_slots(self) -> bool: ...
    @property
    def recomputes(self) -> bool: ...
    @property
    def borrowed_bytes(self) -> int: ...
    def check(self, shape: tuple[int, int, int, int, int], dtype_name: str) -> None: ...
    def forward(
        self, tokens: int, q: Any, k: Any, v: Any, wire: Any
    ) -> tuple[Any, Any, Any, Any]: ...
    def backward(
        self,
        tokens: int,
        q: Any,
        k: Any,
        v: Any,
        out: Optional[Any],
        lse: Optional[Any],
        slot_out: Optional[Any],
        slot_lse: Optional[Any],
        dout: Any,
        dlse: Optional[Any],
        wire: Any,
    ) -> tuple[Any, Any, Any]: ...
    def planned(
        self, shape: tuple[int, int, int, int, int], dtype_name: str, backward: bool
    ) -> tuple[int, int]: ...

def forward_shard_gpu(
    shard: Shard,
    tokens: int,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    stream: int,
    wire: Any,
) -> None: ...
def backward_shard_gpu(
    shard: Shard,
    tokens: int,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Optional[Any],
    dq: Any,
    dk: Any,
    dv: Any,
    stream: int,
    wire: Any,
) -> None: ...
def runs(
    sharding: Any, ranks: int, tokens: int, rank: int
) -> list[tuple[int, int, int]]: ...
def use_threads(threads: int) -> bool: ...
