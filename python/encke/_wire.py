"""Hops over a torch.distributed process group: what a rank sends and receives in a round.

A hop is posted on the group from and to the library's memory, and waited for no longer than the
group's timeout. If a process dies, torch gives its neighbours an error while all other ranks wait.
So a rank that fails, or sees another fail, reports that once in the group's store, and waiting
ranks look there. All ranks raise :class:`encke.RingError` with the first reported failure, so they
name the same rank. A rank that waits for long publishes which rank it waits for, so that a stopped
process is blamed and not one that waits for it.

Hops between GPUs are in ``_gpu_wire`` and use the group's NCCL. A group with NCCL alone exchanges
control messages through its store. ``_transfer`` waits for messages in flight.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from encke._agreed import AgreedRequests
from encke._encke import RingError
from encke._transfer import GRACE, HostTransfer, StoreGather, end, first_sentence, wait_all
from encke._gpu_wire import GpuWire
from encke._reporting import Reporting

# Seconds after which a store that does not answer counts as lost.
_STORE_TIMEOUT = 5.0
_FAILURE_KEY = "encke/failure"
_WAITING_KEY = "encke/waits"
# The tag of control messages; rows have tags below.
_CONTROL_TAG = (1 << 31) - 2


class Disagreement(RingError, ValueError):
    """The requests of the ranks differ. Nothing was computed, and the group can still be used."""


class Failure(NamedTuple):
    """A reported failure: the failed rank, the rank that reports it, where and why."""

    rank: int
    by: int
    place: str
    reason: str


class Wire:
    """The hops of one rank over one group, and the requests its ranks have agreed on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # A weak reference: the group keeps its wire alive, not the other way round.
        self._group = weakref.ref(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._store = _store_of(group)
        host, nccl = _backend(group, "cpu"), _backend(group, "cuda")
        if nccl is not None and nccl.name().lower() != "nccl":
            nccl = None
        self.timeout = _timeout_of(group, host or nccl)
        self.has_host_backend = host is not None
        self.gpu = None if nccl is None else GpuWire(self, nccl)
        self._store_gathers = 0
        self._failure: Optional[Failure] = None
        self.reporting = Reporting(self)
        # The rank that this one waits for, as published in the store.
        self._waiting_for: Optional[int] = None
        # Whether the store's host, the launcher or a rank, has stopped answering.
        self.store_lost = False
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosted_here = not launched and 0 in self._global_ranks
        self.store_host = self._global_ranks.index(0) if hosted_here else None
        self._transfers: queue.SimpleQueue[Optional[HostTransfer]] = queue.SimpleQueue()
        self._waiter: Optional[threading.Thread] = None
        self.agreed = AgreedRequests()
        # How often this rank has begun to agree with the others on a request.
        self.agreements = 0

    @property
    def group(self) -> Any:
        """The group, while it exists."""
        return self._group()

    @property
    def store(self) -> dist.Store:
        """The group's store."""
        return self._store

    def call(self, description: str, device: torch.device) -> _Call:
        """The wire of one pass. Messages of passes with different descriptions do not match."""
        self.check()
        on_gpu = device.type == "cuda" and self.gpu is not None
        if on_gpu:
            self.gpu.begin(device)
        return _Call(self, description, device if on_gpu else None)

    def check(self) -> None:
        """Raises the failure that made this group unusable, if any."""
        if self._failure is not None:
            raise self.error(self._failure, "the group has failed before: make a new one")

    def check_device(self, device: torch.device) -> None:
        """Refuses tensors of a device that the group's backends do not support."""
        if device.type == "cpu" and not self.has_host_backend:
            group = self._group()
            raise ValueError(
                f"the group's backend, {dist.get_backend(group)}, does not support cpu tensors; "
                'make a group that does, for instance init_process_group("cpu:gloo,cuda:nccl")'
            )

    def post_transfer(
        self,
        place: str,
        sends: Sequence[tuple[int, int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor]],
    ) -> HostTransfer:
        """Posts sends and receives of (peer, tag, tensor)."""
        self.check()
        group = self._group()
        transfer = HostTransfer(self, place)
        for direction, messages in (("recv", receives), ("send", sends)):
            post = getattr(group, direction)
            for peer, tag, tensor in messages:
                try:
                    transfer.works.append((peer, post([tensor], peer, tag), tensor))
                except Exception as error:
                    raise self.peer_failed(peer, place, first_sentence(error)) from error
        if self._waiter is None:
            arguments = (self._transfers,)
            self._waiter = threading.Thread(target=wait_all, args=arguments, daemon=True)
            self._waiter.start()
            # The thread ends with the wire, before the interpreter does: a thread that wakes up
            # after that is terminated, and the process with it.
            weakref.finalize(self, end, self._transfers, self._waiter)
        self._transfers.put(transfer)
        return transfer

    def gather(self, place: str, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """All-gather of CPU tensors; ``sizes`` has the elements of each rank."""
        with self.reporting:
            return self._gather(place, own, sizes)

    def _gather(self, place: str, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        if not self.has_host_backend:
            return self._gather_by_store(place, own)
        every = [own.new_empty(size) for size in sizes]
        every[self.rank] = own
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, _CONTROL_TAG, own) for peer in others if sizes[self.rank]]
        receives = [(peer, _CONTROL_TAG, every[peer]) for peer in others if sizes[peer]]
        if others:
            self.post_transfer(place, sends, receives).wait()
        return every

    def _gather_by_store(self, place: str, own: torch.Tensor) -> list[torch.Tensor]:
        self.check()
        self._store_gathers += 1
        gather = StoreGather(self, place, self._store_gathers)
        gather.write(own.contiguous().view(torch.uint8).numpy().tobytes())
        gather.wait()
        return [
            torch.frombuffer(bytearray(data), dtype=own.dtype) if data else own.new_empty(0)
            for data in gather.read()
        ]

    def peer_failed(self, peer: int, place: str, reason: str) -> RingError:
        """The error for a failed hop with ``peer``: all ranks raise the first reported failure."""
        if self.gpu is not None:
            self.gpu.abort()
        until = time.monotonic() + GRACE
        failure = self.reported_failure()
        while failure is None and not self.store_lost and time.monotonic() < until:
            time.sleep(0.05)
            failure = self.reported_failure()
        return self.error(failure or self.report(Failure(peer, self.rank, place, reason)))

    def fail(self, reason: str) -> None:
        """Reports a failure of this rank to the others."""
        if self._failure is None:
            self.report(Failure(self.rank, self.rank, "", reason))
        if self.gpu is not None:
            self.gpu.abort()

    def report(self, failure: Failure) -> Failure:
        """Reports a failure, and returns the first one reported."""
        first = self._report_once(failure)
        self._failure = Failure(*json.loads(first)) if first else failure
        return self._failure

    def announce(self, reason: str) -> None:
        """Reports a failure of this rank that it will raise itself later."""
        self._report_once(Failure(self.rank, self.rank, "", reason))

    def _report_once(self, failure: Failure) -> Any:
        text = json.dumps(failure)
        return self.query_store(lambda: self._store.compare_set(_FAILURE_KEY, "", text))

    def reported_failure(self) -> Optional[Failure]:
        """The failure that a rank has reported, if any."""
        if self._failure is None and self.query_store(lambda: self._store.check([_FAILURE_KEY])):
            text = self.query_store(lambda: self._store.get(_FAILURE_KEY))
            self._failure = Failure(*json.loads(text)) if text else None
        return self._failure

    def publish_waiting_for(self, peer: Optional[int]) -> None:
        """Publishes the rank that this one waits for, or None."""
        if peer != self._waiting_for:
            self._waiting_for = peer
            self.query_store(
                lambda: self._store.set(f"{_WAITING_KEY}/{self.rank}", json.dumps(peer))
            )

    def last_waited_for(self, peer: int) -> int:
        """The end of the chain of ranks that wait for one another, from ``peer`` on; ``peer`` if
        the chain is a circle."""
        seen, last = {self.rank}, peer
        while last not in seen:
            seen.add(last)
            key = f"{_WAITING_KEY}/{last}"
            text = self.query_store(
                lambda: self._store.get(key) if self._store.check([key]) else None
            )
            following = json.loads(text) if text else None
            if following is None:
                return last
            last = following
        return peer

    def query_store(self, question: Callable[[], Any]) -> Any:
        """The store's answer; None if it does not answer in time, because its process died or is
        stopped. It is not queried again then."""
        if self.store_lost:
            return None
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def query_store() -> None:
            try:
                answers.put((True, question()))
            except Exception as error:
                answers.put((False, error))

        threading.Thread(target=query_store, daemon=True).start()
        try:
            answered, answer = answers.get(timeout=_STORE_TIMEOUT)
        except queue.Empty:
            answered, answer = False, None
        self.store_lost = not answered
        return answer if answered else None

    def error(self, failure: Failure, more: str = "") -> RingError:
        """A reported failure as an exception, the same on every rank."""
        if self.gpu is not None:
            self.gpu.abort()

        def name(rank: int) -> str:
            global_rank = self._global_ranks[rank]
            return f"rank {rank}" if global_rank == rank else f"rank {rank} (global {global_rank})"

        text = f"{name(failure.rank)} failed"
        if failure.rank == self.rank and failure.by != self.rank:
            text = f"{name(failure.rank)}, which is this one, was reported as failed"
        text += f": {failure.reason}"
        if failure.by != failure.rank:
            text += f" (reported by {name(failure.by)}, {failure.place})"
        error = RingError(f"{text}; {more}" if more else text)
        error.rank = failure.rank
        return error


class _Call:
    """The wire of one pass, on the host or on a GPU, as the extension calls it."""

    def __init__(self, wire: Wire, description: str, device: Optional[torch.device]) -> None:
        self._wire = wire
        self._device = device
        self.on_gpu = device is not None
        self._salt = (zlib.crc32(description.encode()) & 0x7FFF) << 16

    def post(
        self,
        round: int,
        sends: Sequence[tuple[int, int, int, int]],
        receives: Sequence[tuple[int, int, int, int]],
    ) -> HostTransfer:
        """Posts (peer, tag, address, bytes)."""
        outgoing = [self._message(*message) for message in sends if message[3]]
        incoming = [self._message(*message) for message in receives if message[3]]
        return self._wire.post_transfer(f"round {round}", outgoing, incoming)

    def _message(self, peer: int, tag: int, address: int, count: int) -> tuple[int, int, Any]:
        if tag >= 1 << 16:
            raise RingError(
                f"this plan has a message with tag {tag}; the highest supported is 65535"
            )
        memory = (ctypes.c_char * count).from_address(address)
        return peer, self._salt | tag, torch.frombuffer(memory, dtype=torch.uint8)

    def post_on_gpu(
        self,
        round: int,
        sends: Sequence[tuple[int, int, int, int]],
        receives: Sequence[tuple[int, int, int, int]],
        stream: int,
    ) -> Any:
        """The same for GPU addresses, ordered with this stream."""
        return self._wire.gpu.post_transfer(round, sends, receives, self._device, stream)


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _backend(group: dist.ProcessGroup, device: str) -> Any:
    """The group's backend for a device, if any."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def _timeout_of(group: dist.ProcessGroup, backend: Any) -> float:
    """The group's timeout in seconds."""
    if backend is None:
        raise ValueError(
            f"the group's backend, {dist.get_backend(group)}, does not support cpu tensors and is "
            'not NCCL; make a group that does, for instance init_process_group("gloo")'
        )
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return (timeout or dist.default_pg_timeout or datetime.timedelta(minutes=30)).total_seconds()


_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, Wire] = weakref.WeakKeyDictionary()


def wire_of(group: Optional[dist.ProcessGroup]) -> Wire:
    """The wire over a group, or over all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "there is no process group: start with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"global rank {dist.get_rank()} is not a member of this group")
    wire = _wires.get(group)
    if wire is None:
        wire = _wires[group] = Wire(group)
    return wire
