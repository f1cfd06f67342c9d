"""One call of a ring over processes: the agreement of its ranks, and this rank's part.

Nothing is computed before all ranks have made the same request; an invalid request raises the same
error on all of them. A failure of this rank is reported to the others before it is raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from encke import _cuda, _encke, _gpu
from encke._gpu_mixing import GpuMixing, is_needed
from encke._observed import dispatched, is_plain, observed
from encke._readable import readable
from encke._unusual import refuse_tensor
from encke._wire import Disagreement, Wire, wire_of
from encke.options import Options


class Request(NamedTuple):
    """A rank's request: the options of the attention, and those of the ring over processes."""

    options: Options = Options()
    sizes: Optional[tuple[int, ...]] = None
    grad: bool = False
    return_lse: bool = False
    sinks: bool = False
    query_tokens: Optional[int] = None


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Optional[Tensor],
    group: Optional[dist.ProcessGroup],
    request: Request,
    refusal: Optional[Exception] = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows; ``refusal`` is an error of this rank's own arguments."""
    ring = agreed(wire_of(group), qkv, request, refusal)
    if request.grad:
        return _RingAttention.apply(*qkv, sinks, ring, request)
    out, lse, _, _ = ring.forward(*qkv, sinks)
    return out, lse


class Ring(NamedTuple):
    """A request that all ranks have agreed on: this rank's shard, and the request's description."""

    wire: Wire
    shard: _encke.Shard
    sizes: tuple[int, ...]
    queries: int
    options: Options
    description: str

    @property
    def precision(self) -> Optional[str]:
        """The type of computation and output, if it is not that of the inputs."""
        return self.options.precision

    @property
    def tokens(self) -> int:
        """The length of the whole sequence."""
        return sum(self.sizes)

    @property
    def rows(self) -> tuple[int, int]:
        """Queries and keys of the whole sequence."""
        return self.queries, self.tokens

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor] = None
    ) -> tuple[Any, ...]:
        """out, lse, and both by slot where branches keep slots of their own."""
        if self._is_empty(q):
            return *_gpu.outputs(q, v, self.precision), None, None
        with self.wire.reporting:
            if not q.is_cuda:
                call = self.wire.call(f"forward {self.description}", q.device)
                of = None if sinks is None else sinks.tolist()
                return self.shard.forward(self.rows, q, k, v, call, of)
            mixing = self._mixing()
            results = self.attend(q, k, v) if mixing is None else mixing.forward(q, k, v)
            return *_gpu.with_sinks(*results, sinks), None, None

    def backward(self, *saved: Optional[Tensor], dout: Tensor, dlse: Optional[Tensor]) -> Any:
        """dq, dk, dv, and this rank's share of the gradient of the sinks, which are saved last."""
        q, k, v, out, lse, *_, sinks = saved
        if self._is_empty(q):
            kind = _gpu.computed_in(q, self.precision)
            of_rows = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (q, k, v))
            return *of_rows, None if sinks is None else torch.zeros_like(sinks)
        with self.wire.reporting:
            if not q.is_cuda:
                call = self.wire.call(f"backward {self.description}", q.device)
                of = None if sinks is None else sinks.tolist()
                *gradients, dsinks = self.shard.backward(
                    self.rows, q, k, v, saved[3:7], dout, dlse, call, of
                )
                return *gradients, None if sinks is None else sinks.new_tensor(dsinks)
            inputs = (q, k, v, out, lse, dout, dlse)
            mixing = self._mixing()
            run = self.differentiate if mixing is None else mixing.backward
            return *run(*inputs), _gpu.sink_gradient(sinks, out, lse, dout, dlse)

    def _is_empty(self, q: Tensor) -> bool:
        """Whether no rank has a query, so that nothing is computed or sent."""
        return not (self.queries and q.shape[0])

    def _mixing(self) -> Optional[GpuMixing]:
        if not is_needed(self.options):
            return None
        return GpuMixing(self.options, lambda options: self._replace(options=options))

    @property
    def _kernels(self) -> _encke.Shard:
        """This rank without what is around the calls of the kernels."""
        return shard_of(self.wire, self.options._replace(padding=None), self.sizes)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, clears: bool = True
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a call on a GPU, without extra terms."""
        call = self.wire.call(f"forward {self.description}", q.device)
        _cuda.prepare()
        with torch.cuda.device(q.device):
            outputs = _gpu.outputs(q, v, self.precision)
            stream = torch.cuda.current_stream().cuda_stream
            _encke.enqueue_shard(self._kernels, self.tokens, (q, k, v), outputs, stream, call)
        return outputs

    def differentiate(self, *inputs: Optional[Tensor]) -> list[Tensor]:
        """dq, dk and dv of a call on a GPU."""
        q, k, v = (x for x in inputs[:3] if x is not None)
        call = self.wire.call(f"backward {self.description}", q.device)
        with torch.cuda.device(q.device):
            gradients = _gpu.gradients(q, k, v, self.precision)
            stream = torch.cuda.current_stream().cuda_stream
            _encke.enqueue_shard(self._kernels, self.tokens, inputs, gradients, stream, call)
        return gradients

    def takes_deltas(self, q: Tensor, k: Tensor) -> bool:
        """The ranks differentiate branch by branch."""
        return False

    def phantoms(self, q: Tensor, k: Tensor, v: Tensor) -> Optional[bytes]:
        """The logarithms of the phantom keys of this rank's queries."""
        shard = shard_of(self.wire, self.options, self.sizes)
        sizes = (k.shape[0], self.tokens, q.shape[2], *k.shape[2:], self.queries, v.shape[3])
        return shard.phantoms(sizes, str(q.dtype))


class _RingAttention(torch.autograd.Function):
    """Ring attention with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Optional[Tensor],
        ring: Ring,
        request: Request,
    ) -> tuple[Tensor, Tensor]:
        out, lse, slot_out, slot_lse = ring.forward(q, k, v, sinks)
        ctx.ring, ctx.request = ring, request
        ctx.with_lse = request.return_lse
        if not ctx.with_lse:
            ctx.mark_non_differentiable(lse)
        if ring.shard.recomputes:
            ctx.save_for_backward(q, k, v, None, None, None, None, sinks)
        elif slot_out is not None:
            ctx.save_for_backward(q, k, v, None, lse, slot_out, slot_lse, sinks)
        else:
            ctx.save_for_backward(q, k, v, out, lse, None, None, sinks)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        # Whether the lse has a gradient depends on the agreed request, not on this rank's loss: the
        # messages of all ranks must match.
        given = [dout, dlse if ctx.with_lse else None]
        with ctx.ring.wire.reporting:
            refuse_tensor("dout", dout)
            plain = is_plain(dout, dlse)
            if plain:
                given = [None if x is None else readable(x).contiguous() for x in given]
        if observed() or not plain:
            from encke._ring_operator import backward_as_operator

            def call() -> Any:
                return backward_as_operator(ctx.ring, ctx.request, ctx.saved_tensors, *given)

            with ctx.ring.wire.reporting:
                every = dispatched(call, dout=dout)
        else:
            every = ctx.ring.backward(*ctx.saved_tensors, dout=given[0], dlse=given[1])
        needed = zip(every, ctx.needs_input_grad)
        return *(gradient if need else None for gradient, need in needed), None, None


def refuse_on_all(group: Optional[dist.ProcessGroup], refusal: Exception) -> None:
    """Raises what is wrong with this rank's own arguments, once the other ranks, which wait for its
    request, know it too."""
    if not dist.is_initialized():
        raise refusal
    wire = wire_of(group)
    wire.check()
    # Whatever looks at the rank's operators has nothing to do with its messages.
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        agree(wire, {}, (-1, -1), refusal)


@contextlib.contextmanager
def refusing_on_all(group: Optional[dist.ProcessGroup]) -> Iterator[None]:
    """A call that this rank may refuse before it takes part in the ranks' agreement, for which the
    others wait: it is refused on all of them then."""
    wire = wire_of(group)
    before = wire.agreements
    try:
        yield
    except Exception as error:
        if wire.agreements == before:
            refuse_on_all(group, error)
        raise


def agreed(
    wire: Wire,
    given: tuple[Tensor, Tensor, Tensor],
    request: Request,
    refusal: Optional[Exception] = None,
) -> Ring:
    """The ring for a call, once all ranks have made the same request."""
    wire.check()
    wire.agreements += 1
    rows = tuple(x.shape[1] if x.dim() == 4 else -1 for x in given[:2])
    shapes = tuple((*x.shape[:1], *x.shape[2:]) for x in given)
    key = (request, shapes, rows, given[0].dtype, given[0].device)
    cached = wire.agreed.get(request.options, key) if request.sizes is not None else None
    if cached is not None and refusal is None:
        return cached
    description = _describe(given, request)
    try:
        _check(given, request)
        wire.check_device(given[0].device)
    except (TypeError, ValueError) as error:
        refusal = error
    queries, every = zip(*agree(wire, description, rows, refusal))
    if request.sizes is not None and every != request.sizes:
        raise Disagreement(f"sizes is {list(request.sizes)}, but the ranks have {list(every)} rows")
    # From here on every rank has the same description, and raises the same errors.
    _check_queries(request, queries, every)
    ring = ring_of(wire, given, request, every, sum(queries))
    if request.sizes is not None:
        wire.agreed.put(request.options, key, ring)
    return ring


def _check_queries(request: Request, queries: tuple[int, ...], every: tuple[int, ...]) -> None:
    """Refuses queries that are not on the ranks of the tokens at their positions."""
    tokens, total = sum(every), sum(queries)
    if request.query_tokens not in (None, total):
        raise ValueError(
            f"query_tokens is {request.query_tokens}, but the ranks have {total} queries"
        )
    if not total:
        return
    if total > tokens:
        raise ValueError(f"the ranks have {total} queries, but only {tokens} keys")
    first = tokens - total if request.options.query_offset is None else request.options.query_offset
    options, ranks = request.options, len(every)
    cut = cut_of(options.sharding, every, options.documents)
    runs = (_encke.query_runs(cut, ranks, tokens, rank, first, total) for rank in range(ranks))
    expected = [sum(count for _, _, count in of_rank) for of_rank in runs]
    if list(queries) != expected:
        raise ValueError(
            f"the ranks have {list(queries)} queries, but the {total} tokens from position {first} "
            f"on are {expected} rows of them: cut q with encke.distributed.shard(q, "
            f"tokens={tokens})"
        )


def ring_of(
    wire: Wire,
    given: tuple[Tensor, ...],
    request: Request,
    every: tuple[int, ...],
    queries: int,
) -> Ring:
    """The ring of ranks that have agreed; ``every`` has the keys of each rank, and ``queries`` are
    those of all ranks.
    """
    options = request.options
    q, k, v = given
    if not (queries and q.shape[0]):
        return _empty_ring(wire, given, request, every, queries)
    shard = shard_of(wire, options, every)
    if q.is_cuda and (0 in every or options.mode == "fkodom" or options.checkpoint != "keep"):
        raise ValueError(
            'on GPUs every rank must have rows, mode="fkodom" is not computed and checkpoint must '
            f'be "keep"; the rows are {list(every)}'
        )
    tokens = sum(every)
    if q.is_cuda and queries != tokens:
        raise ValueError(
            f"on GPUs every key needs its query, but there are {queries} queries for {tokens} keys"
        )
    sizes = (q.shape[0], tokens, q.shape[2], k.shape[2], q.shape[3])
    shape = (*sizes, queries, v.shape[3])
    shard.check(shape, options.precision or str(q.dtype))
    description = json.dumps([_describe(given, request), every, queries], default=str)
    return Ring(wire, shard, every, queries, options, description)


def _empty_ring(
    wire: Wire,
    given: tuple[Tensor, ...],
    request: Request,
    every: tuple[int, ...],
    queries: int,
) -> Ring:
    """The ring of a call without queries: its options must be right all the same."""
    heads, of_keys = given[0].shape[2], given[1].shape[2]
    if not of_keys or heads % of_keys:
        raise ValueError(f"{heads} heads cannot share {of_keys} key heads equally")
    # No sharding and no document has a token.
    options = request.options._replace(sharding="contiguous", documents=None)
    shard = shard_of(wire, options, (1,) * wire.size)
    return Ring(wire, shard, every, queries, request.options, "")


def _describe(given: tuple[Tensor, ...], request: Request) -> dict[str, Any]:
    """Everything that must be equal on all ranks."""
    description = {"version": _encke.__version__, **request.options._asdict(), **request._asdict()}
    del description["options"]
    description["device"] = given[0].device.type
    description["dtypes"] = [str(x.dtype) for x in given]
    description["shapes"] = [(*x.shape[:1], *x.shape[2:]) for x in given]
    return description


def _check(given: tuple[Tensor, Tensor, Tensor], request: Request) -> None:
    """Refuses tensors that are not a shard."""
    for name, tensor in zip("qkv", given):
        if tensor.dim() != 4:
            shape = list(tensor.shape)
            raise ValueError(f"{name} has shape {shape}; a shard is [batch, rows, heads, dim]")
        if tensor.device != given[0].device or tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name} is on {tensor.device} and q on {given[0].device}; all must be on one "
                "device, cpu or cuda"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name}: the last dimension has stride {tensor.stride(-1)}; it must be contiguous "
                "(stride 1): make a contiguous copy"
            )
        if tensor.dtype != given[0].dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} but q is {given[0].dtype}; convert one of them"
            )
    of_q, of_k, of_v = ((*tensor.shape[:1], *tensor.shape[2:]) for tensor in given)
    if of_q[0] != of_k[0] or of_q[2] != of_k[2]:
        raise ValueError(
            f"k has shape {list(given[1].shape)} and q {list(given[0].shape)}; batch and head "
            "dimension must be equal"
        )
    if of_v[:2] != of_k[:2]:
        raise ValueError(
            f"v has shape {list(given[2].shape)} and k {list(given[1].shape)}; batch and heads "
            "must be equal"
        )
    q, k, v = (tensor.shape[1] for tensor in given)
    if v != k:
        raise ValueError(f"v has {v} rows but k has {k}")
    if q != k and request.sizes is not None and request.query_tokens is None:
        raise ValueError(
            f"q has {q} rows but k has {k}; with sizes and fewer queries than keys, give "
            "query_tokens, the number of queries of the whole sequence"
        )


def agree(
    wire: Wire,
    description: dict[str, Any],
    rows: tuple[int, ...],
    refusal: Optional[Exception],
) -> list[tuple[int, ...]]:
    """Both numbers of rows of every rank, or the same error on all ranks if requests differ."""
    text = json.dumps(description, default=str, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if refusal is not None:
        text = json.dumps({"refusal": str(refusal)})
    encoded = text.encode()
    header = [digest, len(encoded), int(refusal is not None), *rows]
    own = torch.tensor(header, device="cpu")
    every = torch.stack(wire.gather("agreeing on the request", own, [5] * wire.size)).tolist()
    if all(other[0] == digest and not other[2] for other in every):
        return [tuple(other[3:]) for other in every]
    own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    texts = wire.gather("agreeing on the request", own, [other[1] for other in every])
    if refusal is not None:
        raise refusal
    requests = [json.loads(bytes(other.numpy())) for other in texts]
    for rank, request in enumerate(requests):
        if "refusal" in request:
            raise Disagreement(f"rank {rank} cannot take part: {request['refusal']}")
    for option in requests[0]:
        values = [request.get(option) for request in requests]
        if any(value != values[0] for value in values):
            different = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise Disagreement(f"the ranks do not agree on {option}: {different}")
    raise Disagreement("the ranks do not agree, but their descriptions are equal")


def shard_of(wire: Wire, options: Options, sizes: tuple[int, ...]) -> _encke.Shard:
    """This rank with these options; made once for all seeds."""
    if options.seed:
        return shard_of(wire, options._replace(seed=0), sizes).with_seed(options.seed)
    shard = wire.agreed.get(options, (options, sizes))
    if shard is None:
        shard = _shard(wire, options, sizes)
        wire.agreed.put(options, (options, sizes), shard)
    return shard


def _shard(wire: Wire, options: Options, sizes: Sequence[int]) -> _encke.Shard:
    _encke.use_threads(torch.get_num_threads())
    cut = cut_of(options.sharding, sizes, options.documents)
    return _encke.Shard({**options._asdict(), "ranks": wire.size, "sharding": cut}, wire.rank)


def cut_of(sharding: Any, sizes: Sequence[int], documents: Any = None) -> Union[str, list[Any]]:
    """The library's cut for shards of these sizes."""
    if sharding not in ("contiguous", "balanced"):
        cut = sharding
        if sharding == "documents":
            cut = _encke.by_document(documents, len(sizes), sum(sizes))
        expected = expected_sizes(sum(sizes), len(sizes), cut)
        if list(sizes) != expected:
            raise ValueError(
                f"{sharding} sharding of {sum(sizes)} tokens gives the ranks {expected} rows, but "
                f"they have {list(sizes)}; cut the sequence with encke.distributed.shard"
            )
        return cut
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def expected_sizes(tokens: int, ranks: int, sharding: Any) -> list[int]:
    """The default number of rows of each rank."""
    runs = (_encke.runs(sharding, ranks, tokens, rank) for rank in range(ranks))
    return [sum(count for _, _, count in of_rank) for of_rank in runs]
