"""Hops over a process group that somebody else has made: what a rank sends and receives in a round.

A hop is posted on the group as it is, from and into the library's own memory, and waited for no longer
than the group's timeout. What torch does not do is tell: where a process dies its neighbours get an
error and everyone else waits. So whoever fails, or sees another fail, leaves word in the group's store,
once and for all, and whoever waits looks there. The first word is everybody's: all ranks raise
:class:`encke.RingError` naming the same rank. Whoever waits for long says for whom, so that a process
that has stopped is blamed, and not one that waits for it.

Hops between GPUs are in ``_gpu_wire``, and use the group's NCCL where it has that. A group that has
nothing else talks by way of its store.

How flights are waited for is in ``_flight``.
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

from encke._encke import RingError
from encke._flight import GRACE, HostFlight, Letters, end, first_words, land_all
from encke._gpu_wire import GpuWire

# Seconds after which a store that does not answer is taken for gone.
_STORE = 5.0
_KEY = "encke/failure"
_WAITS = "encke/waits"
# What ranks tell each other beside rows; rows have tags below.
_TALK = (1 << 31) - 2


class Disagreement(RingError, ValueError):
    """The ranks of a group do not ask for the same thing. Nothing was computed, and the group is as
    good as before."""


class Failure(NamedTuple):
    """Word of a failure: who failed, who says so, where and why."""

    rank: int
    by: int
    place: str
    reason: str


class Wire:
    """The hops of one rank over one group, and what its ranks have agreed on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # The group keeps its wire alive, not the other way round.
        self._group = weakref.ref(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._store = _store_of(group)
        host, nccl = _backend(group, "cpu"), _backend(group, "cuda")
        if nccl is not None and nccl.name().lower() != "nccl":
            nccl = None
        self.timeout = _timeout_of(group, host or nccl)
        self.moves_host = host is not None
        self.gpu = None if nccl is None else GpuWire(self, nccl)
        self._letters = 0
        self._failure: Optional[Failure] = None
        # Whom this rank waits for, as the others know it.
        self._waits_for: Optional[int] = None
        # Whether whoever keeps the store has stopped answering: the launcher, or else a rank.
        self.store_is_gone = False
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        kept_here = not launched and 0 in self._global_ranks
        self.store_keeper = self._global_ranks.index(0) if kept_here else None
        self._flights: queue.SimpleQueue[Optional[HostFlight]] = queue.SimpleQueue()
        self._waiter: Optional[threading.Thread] = None
        # Requests that all ranks have made with the same words, by those words.
        self.agreed: dict[Any, Any] = {}

    @property
    def group(self) -> Any:
        """The group, as long as it is somebody's."""
        return self._group()

    @property
    def store(self) -> dist.Store:
        """The group's store."""
        return self._store

    def call(self, words: str, device: torch.device) -> _Call:
        """What the library calls in one pass; passes of different words never meet."""
        self.check()
        on_gpu = device.type == "cuda" and self.gpu is not None
        if on_gpu:
            self.gpu.begin(device)
        return _Call(self, words, device if on_gpu else None)

    def check(self) -> None:
        """Raises what has made this group unusable, if anything has."""
        if self._failure is not None:
            raise self.error(self._failure, "the group had failed before: make a new one")

    def refuse(self, device: torch.device) -> None:
        """Refuses tensors of a device that this group has no way to move."""
        if device.type == "cpu" and not self.moves_host:
            group = self._group()
            raise ValueError(
                f"the group's backend, {dist.get_backend(group)}, moves no tensors that are on the cpu; "
                'make a group that does, for instance init_process_group("cpu:gloo,cuda:nccl")'
            )

    def fly(
        self,
        place: str,
        sends: Sequence[tuple[int, int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor]],
    ) -> HostFlight:
        """Posts (peer, tag, tensor) to be sent and to be received."""
        self.check()
        group = self._group()
        flight = HostFlight(self, place)
        for direction, messages in (("recv", receives), ("send", sends)):
            post = getattr(group, direction)
            for peer, tag, tensor in messages:
                try:
                    flight.works.append((peer, post([tensor], peer, tag), tensor))
                except Exception as error:
                    raise self.lost(peer, place, first_words(error)) from error
        if self._waiter is None:
            arguments = (self._flights,)
            self._waiter = threading.Thread(target=land_all, args=arguments, daemon=True)
            self._waiter.start()
            # The thread ends with the wire, and before Python does: one that is woken after that is
            # ended by force, and takes the process with it.
            weakref.finalize(self, end, self._flights, self._waiter)
        self._flights.put(flight)
        return flight

    def gather(self, place: str, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Everyone's numbers, which are as many as ``sizes`` says, at everyone; on the cpu."""
        if not self.moves_host:
            return self._gather_by_store(place, own)
        every = [own.new_empty(size) for size in sizes]
        every[self.rank] = own
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(peer, _TALK, own) for peer in others if sizes[self.rank]]
        receives = [(peer, _TALK, every[peer]) for peer in others if sizes[peer]]
        if others:
            self.fly(place, sends, receives).wait()
        return every

    def _gather_by_store(self, place: str, own: torch.Tensor) -> list[torch.Tensor]:
        self.check()
        self._letters += 1
        letters = Letters(self, place, self._letters)
        letters.write(own.contiguous().view(torch.uint8).numpy().tobytes())
        letters.wait()
        return [
            torch.frombuffer(bytearray(text), dtype=own.dtype) if text else own.new_empty(0)
            for text in letters.read()
        ]

    def lost(self, peer: int, place: str, reason: str) -> RingError:
        """What to raise when a hop with ``peer`` has failed: the first word of it is everybody's."""
        if self.gpu is not None:
            self.gpu.separate()
        until = time.monotonic() + GRACE
        heard = self.heard()
        while heard is None and not self.store_is_gone and time.monotonic() < until:
            time.sleep(0.05)
            heard = self.heard()
        return self.error(heard or self.tell(Failure(peer, self.rank, place, reason)))

    def fail(self, reason: str) -> None:
        """Tells everyone that this rank has failed by itself."""
        if self._failure is None:
            self.tell(Failure(self.rank, self.rank, "", reason))
        if self.gpu is not None:
            self.gpu.separate()

    def tell(self, failure: Failure) -> Failure:
        """Leaves word, and returns the first that was left."""
        word = json.dumps(failure)
        first = self.ask(lambda: self._store.compare_set(_KEY, "", word))
        self._failure = Failure(*json.loads(first)) if first else failure
        return self._failure

    def heard(self) -> Optional[Failure]:
        """Word that somebody left, if anybody has."""
        if self._failure is None and self.ask(lambda: self._store.check([_KEY])):
            word = self.ask(lambda: self._store.get(_KEY))
            self._failure = Failure(*json.loads(word)) if word else None
        return self._failure

    def waits_for(self, peer: Optional[int]) -> None:
        """Tells everyone whom this rank waits for, or that it goes on."""
        if peer != self._waits_for:
            self._waits_for = peer
            self.ask(lambda: self._store.set(f"{_WAITS}/{self.rank}", json.dumps(peer)))

    def last_waited_for(self, peer: int) -> int:
        """The rank that ``peer`` waits for, or the one that that one waits for, and so on; ``peer``
        where they wait for one another."""
        seen, last = {self.rank}, peer
        while last not in seen:
            seen.add(last)
            key = f"{_WAITS}/{last}"
            word = self.ask(lambda: self._store.get(key) if self._store.check([key]) else None)
            following = json.loads(word) if word else None
            if following is None:
                return last
            last = following
        return peer

    def ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers. One that does not, because its process died or is stopped, is not
        asked again."""
        if self.store_is_gone:
            return None
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((True, question()))
            except Exception as error:
                answers.put((False, error))

        threading.Thread(target=ask, daemon=True).start()
        try:
            answered, answer = answers.get(timeout=_STORE)
        except queue.Empty:
            answered, answer = False, None
        self.store_is_gone = not answered
        return answer if answered else None

    def error(self, failure: Failure, more: str = "") -> RingError:
        """Word of a failure as everybody raises it."""
        if self.gpu is not None:
            self.gpu.separate()

        def name(rank: int) -> str:
            there = self._global_ranks[rank]
            return f"rank {rank}" if there == rank else f"rank {rank} (of all: {there})"

        text = f"{name(failure.rank)} failed"
        if failure.rank == self.rank and failure.by != self.rank:
            text = f"{name(failure.rank)}, which is this one, was given up"
        text += f": {failure.reason}"
        if failure.by != failure.rank:
            text += f" (says {name(failure.by)}, {failure.place})"
        error = RingError(f"{text}; {more}" if more else text)
        error.rank = failure.rank
        return error


class _Call:
    """The wire as the library sees it in one pass, on the host or on a GPU."""

    def __init__(self, wire: Wire, words: str, device: Optional[torch.device]) -> None:
        self._wire = wire
        self._device = device
        self.on_gpu = device is not None
        self._salt = (zlib.crc32(words.encode()) & 0x7FFF) << 16

    def post(
        self,
        round: int,
        sends: Sequence[tuple[int, int, int, int]],
        receives: Sequence[tuple[int, int, int, int]],
    ) -> HostFlight:
        """Posts (peer, tag, address, bytes)."""
        outgoing = [self._message(*message) for message in sends if message[3]]
        incoming = [self._message(*message) for message in receives if message[3]]
        return self._wire.fly(f"round {round}", outgoing, incoming)

    def _message(self, peer: int, tag: int, address: int, count: int) -> tuple[int, int, Any]:
        if tag >= 1 << 16:
            raise RingError(f"this plan has a message of tag {tag}, and 65535 is the highest there is")
        memory = (ctypes.c_char * count).from_address(address)
        return peer, self._salt | tag, torch.frombuffer(memory, dtype=torch.uint8)

    def post_on_gpu(
        self,
        round: int,
        sends: Sequence[tuple[int, int, int, int]],
        receives: Sequence[tuple[int, int, int, int]],
        stream: int,
    ) -> Any:
        """The same for addresses on the GPU, between what this stream has now and what it gets next."""
        return self._wire.gpu.fly(round, sends, receives, self._device, stream)


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _backend(group: dist.ProcessGroup, device: str) -> Any:
    """What moves the tensors of a device, if anything does."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def _timeout_of(group: dist.ProcessGroup, backend: Any) -> float:
    """The group's timeout in seconds."""
    if backend is None:
        raise ValueError(
            f"the group's backend, {dist.get_backend(group)}, moves no tensors that are on the cpu, and "
            'is not NCCL; make a group that does, for instance init_process_group("gloo")'
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
        raise ValueError(f"rank {dist.get_rank()} of all is no member of this group")
    wire = _wires.get(group)
    if wire is None:
        wire = _wires[group] = Wire(group)
    return wire
