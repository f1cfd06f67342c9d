"""One call of a ring over processes: what its ranks agree on, and this rank's part of it.

Nothing is computed before all ranks have asked for the same thing; what cannot be computed is refused by
all of them with the same words. That a failure of one rank is told to the others before it is raised is
seen to here, and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from encke import _cuda, _encke
from encke._torch import _computed_in, _summed_in
from encke._wire import Disagreement, Wire, wire_of
from encke.options import Options


class Request(NamedTuple):
    """What a rank asks for: options of :class:`encke.options.Options`, and what concerns the ranks."""

    segment_lengths: Optional[tuple[int, ...]] = None
    dilation_rates: Optional[tuple[int, ...]] = None
    mode: str = "group"
    group_scale: Optional[str] = None
    offsets: Optional[str] = None
    mixing_gradient: Optional[str] = None
    causal: bool = False
    scale: Optional[float] = None
    sharding: str = "contiguous"
    precision: Optional[str] = None
    checkpoint: str = "keep"
    sizes: Optional[tuple[int, ...]] = None
    grad: bool = False
    return_lse: bool = False

    def options(self) -> Options:
        """The part that decides what is computed and how."""
        given = self._asdict()
        for name in ("sizes", "grad", "return_lse"):
            del given[name]
        return Options(**given)


def attend(
    q: Tensor, k: Tensor, v: Tensor, group: Optional[dist.ProcessGroup], request: Request
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    ring = agreed(wire_of(group), (q, k, v), request)
    if request.grad:
        return _RingAttention.apply(q, k, v, ring, request.return_lse)
    out, lse, _, _ = ring.forward(q, k, v)
    return out, lse


class Ring(NamedTuple):
    """What the ranks have agreed on: this rank's part of it, and the words that name it."""

    wire: Wire
    shard: _encke.Shard
    sizes: tuple[int, ...]
    precision: Optional[str]
    words: str

    @property
    def tokens(self) -> int:
        """How many rows all ranks have."""
        return sum(self.sizes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """out, lse, and by slot where branches keep slots of their own."""
        call = self.wire.call(f"forward {self.words}", q.device)
        with _telling(self.wire):
            if not q.is_cuda:
                return self.shard.forward(self.tokens, q, k, v, call)
            _cuda.prepare()
            dtype = _computed_in(q, self.precision)
            with torch.cuda.device(q.device):
                out = torch.empty(q.shape, dtype=dtype, device=q.device)
                lse = torch.empty(q.shape[:3], dtype=_summed_in(dtype), device=q.device)
                stream = torch.cuda.current_stream().cuda_stream
                given = (self.shard, self.tokens, q, k, v, out, lse, stream, call)
                _encke.forward_shard_gpu(*given)
            return out, lse, None, None

    def backward(self, *saved: Optional[Tensor], dout: Tensor, dlse: Optional[Tensor]) -> Any:
        """dq, dk, dv."""
        q, k, v, out, lse = saved[:5]
        call = self.wire.call(f"backward {self.words}", q.device)
        with _telling(self.wire):
            if not q.is_cuda:
                return self.shard.backward(self.tokens, *saved, dout, dlse, call)
            dtype = _computed_in(q, self.precision)
            with torch.cuda.device(q.device):
                gradients = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]
                stream = torch.cuda.current_stream().cuda_stream
                given = (self.shard, self.tokens, q, k, v, out, lse, dout, dlse)
                _encke.backward_shard_gpu(*given, *gradients, stream, call)
            return gradients


class _telling:
    """Whatever a rank fails of, the others are told before it is raised."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is not None:
            self._wire.fail(f"{type(error).__name__}: {error}")


class _RingAttention(torch.autograd.Function):
    """Ring attention with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, slot_out, slot_lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.with_lse = return_lse
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        if ring.shard.recomputes:
            ctx.save_for_backward(q, k, v, None, None, None, None)
        elif ring.shard.splits_slots:
            ctx.save_for_backward(q, k, v, None, lse, slot_out, slot_lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, None, None)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        # Whether the lse has a gradient is decided by what all ranks have agreed on, not by what this
        # rank's loss makes of it: the messages are others.
        dlse = dlse.contiguous() if ctx.with_lse else None
        dq, dk, dv = ctx.ring.backward(*ctx.saved_tensors, dout=dout.contiguous(), dlse=dlse)
        need_q, need_k, need_v = ctx.needs_input_grad[:3]
        kept = (x if need else None for x, need in ((dq, need_q), (dk, need_k), (dv, need_v)))
        return *kept, None, None


def agreed(wire: Wire, given: tuple[Tensor, Tensor, Tensor], request: Request) -> Ring:
    """The ring for a call, once all ranks have asked for the same one."""
    wire.check()
    rows = given[0].shape[1] if given[0].dim() == 4 else -1
    shapes = tuple((x.shape[0], *x.shape[2:]) for x in given)
    key = (request, shapes, rows, given[0].dtype, given[0].device)
    known = wire.agreed.get(key) if request.sizes is not None else None
    if known is not None:
        return known
    words = _words(given, request)
    refusal: Optional[Exception] = None
    try:
        _check(given)
        wire.refuse(given[0].device)
    except (TypeError, ValueError) as error:
        refusal = error
    every = tuple(ask(wire, words, rows, refusal))
    if request.sizes is not None and every != request.sizes:
        raise Disagreement(f"sizes says {list(request.sizes)} rows, but the ranks have {list(every)}")
    # From here on every rank has the same words and comes to the same end.
    ring = ring_of(wire, given, request, every)
    if request.sizes is not None:
        wire.agreed[key] = ring
    return ring


def ring_of(
    wire: Wire, given: tuple[Tensor, ...], request: Request, every: tuple[int, ...]
) -> Ring:
    """The ring of ranks that have agreed, and have so many rows each."""
    options = request.options()
    known = wire.agreed.get((options, every))
    if known is None:
        known = _shard(wire, options, every)
        if len(wire.agreed) >= 1024:
            wire.agreed.clear()
        wire.agreed[options, every] = known
    q, k, _ = given
    if q.is_cuda and (0 in every or known.splits_slots or options.checkpoint != "keep"):
        raise ValueError(
            "on GPUs every rank has rows, branches are combined under one softmax "
            f'(mixing_gradient="exact") and checkpoint is "keep"; the rows are {list(every)}'
        )
    tokens = sum(every)
    shape = (q.shape[0], tokens, q.shape[2], k.shape[2], q.shape[3])
    known.check(shape, options.precision or str(q.dtype))
    words = json.dumps([_words(given, request), every], default=str)
    return Ring(wire, known, every, options.precision, words)


def _words(given: tuple[Tensor, ...], request: Request) -> dict[str, Any]:
    """All that every rank must say the same of."""
    words = {"version": _encke.__version__, **request._asdict(), "device": given[0].device.type}
    words["dtypes"] = [str(x.dtype) for x in given]
    words["shapes"] = [(x.shape[0], *x.shape[2:]) for x in given]
    return words


def _check(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """Refuses tensors that cannot be a shard's."""
    for name, tensor in zip("qkv", given):
        if tensor.dim() != 4:
            shape = list(tensor.shape)
            raise ValueError(f"{name} has shape {shape}; a shard is [batch, rows, heads, dim]")
        if tensor.device != given[0].device or tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name} is on {tensor.device} and q on {given[0].device}; Encke computes on the cpu "
                "and on cuda, and wants all in one place"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name}: the last dimension has stride {tensor.stride(-1)}; it must be contiguous "
                "(stride 1): make a contiguous copy"
            )
        if tensor.dtype != given[0].dtype:
            raise TypeError(f"{name} is {tensor.dtype} but q is {given[0].dtype}; convert one of them")
        if tensor.shape[1] != given[0].shape[1]:
            rows = given[0].shape[1]
            raise ValueError(f"{name} has {tensor.shape[1]} rows but q has {rows}")


def ask(wire: Wire, words: dict[str, Any], rows: int, refusal: Optional[Exception]) -> list[int]:
    """Everyone's rows, or the same error on all ranks where they do not ask for the same."""
    text = json.dumps(words, default=str, sort_keys=True)
    name = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if refusal is not None:
        text = json.dumps({"refusal": str(refusal)})
    said = text.encode()
    own = torch.tensor([name, rows, len(said), int(refusal is not None)])
    every = torch.stack(wire.gather("asking the others", own, [4] * wire.size)).tolist()
    if all(there[0] == name and not there[3] for there in every):
        return [there[1] for there in every]
    own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    texts = wire.gather("asking the others", own, [there[2] for there in every])
    if refusal is not None:
        raise refusal
    everyone = [json.loads(bytes(there.numpy())) for there in texts]
    for rank, there in enumerate(everyone):
        if "refusal" in there:
            raise Disagreement(f"rank {rank} cannot take part: {there['refusal']}")
    for option in everyone[0]:
        asked = [there.get(option) for there in everyone]
        if any(there != asked[0] for there in asked):
            different = "; ".join(f"rank {rank}: {there}" for rank, there in enumerate(asked))
            raise Disagreement(f"the ranks do not agree on {option}: {different}")
    raise Disagreement("the ranks do not agree, and cannot say on what")


def _shard(wire: Wire, options: Options, sizes: Sequence[int]) -> _encke.Shard:
    """This rank with these options."""
    _encke.use_threads(torch.get_num_threads())
    cut = cut_of(options.sharding, sizes)
    return _encke.Shard({**options._asdict(), "ranks": wire.size, "sharding": cut}, wire.rank)


def cut_of(sharding: Any, sizes: Sequence[int]) -> Union[str, list[int]]:
    """How shards of these sizes are cut, as the library has it."""
    if sharding != "contiguous":
        expected = expected_sizes(sum(sizes), len(sizes), sharding)
        if list(sizes) != expected:
            raise ValueError(
                f"{sharding} sharding of {sum(sizes)} tokens gives the ranks {expected} rows, but "
                f"they have {list(sizes)}; cut the sequence with encke.distributed.shard"
            )
        return sharding
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def expected_sizes(tokens: int, ranks: int, sharding: str) -> list[int]:
    """How many of so many tokens each rank has, where nobody says otherwise."""
    runs = (_encke.runs(sharding, ranks, tokens, rank) for rank in range(ranks))
    return [sum(count for _, _, count in of_rank) for of_rank in runs]
