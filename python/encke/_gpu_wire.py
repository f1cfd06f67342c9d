"""Hops between GPUs over the group's NCCL, from GPU memory to GPU memory.

A hop is one batch of sends and receives on the group's own stream, ordered between two points of a
stream of the library: nothing is staged, and the host only watches the deadline. NCCL does not
report a process that died: its kernels wait. So every rank writes heartbeats with its progress to
the group's store, and waiting ranks check them; the rank whose heartbeat is stale, or that is
furthest behind at the timeout, is blamed. After a failure the group's communicators are aborted,
because their operations cannot complete and torch would end the process.

A separate thread posts the operations: the first hop between two ranks connects them, and can block
for ever.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist

from encke._transfer import Transfer, first_sentence

if TYPE_CHECKING:
    from encke._wire import Wire

# Seconds between two heartbeats, and between two checks of those of others.
_HEARTBEAT_INTERVAL = 1.0
# Seconds without a heartbeat after which a rank counts as dead, unless the group's timeout is
# shorter.
_HEARTBEAT_TIMEOUT = 30.0
# Seconds to wait for the abort of the communicators.
_ABORT_TIMEOUT = 10.0

Message = tuple[int, int, int, int]


class GpuWire:
    """The hops of one rank between GPUs."""

    def __init__(self, wire: Wire, backend: Any) -> None:
        self._wire = weakref.ref(wire)
        self._backend = backend
        self._aborted = False
        # GPUs on which all ranks are connected: NCCL needs all ranks before any two can
        # communicate.
        self._connected: set[int] = set()
        self._transfers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._poster: Optional[threading.Thread] = None
        self.heartbeat: Optional[Heartbeat] = None

    def begin(self, device: torch.device) -> None:
        """Begins a pass on this GPU; the first one connects all ranks."""
        wire = self._wire()
        if self._poster is None:
            self._poster = threading.Thread(target=_post_all, args=(self._transfers,), daemon=True)
            self._poster.start()
            weakref.finalize(self, _end, self._transfers, self._poster)
            self.heartbeat = Heartbeat(
                wire.store, wire.rank, wire.size, min(_HEARTBEAT_TIMEOUT, wire.timeout / 3)
            )
        self.heartbeat.next_pass()
        number = device.index
        if wire.size > 1 and number not in self._connected:
            self._launch(NcclConnect(wire, "connecting the ranks", device)).wait()
            self._connected.add(number)

    def post_transfer(
        self,
        round: int,
        sends: Sequence[Message],
        receives: Sequence[Message],
        device: torch.device,
        stream: int,
    ) -> GpuTransfer:
        """Posts (peer, tag, address, bytes), in the same order at both ends."""
        wire = self._wire()
        self.heartbeat.round = round + 1
        transfer = self._launch(
            GpuTransfer(wire, f"round {round}", device, stream, sends, receives)
        )
        # The library enqueues its next work on this stream, so the hops must have been posted.
        while not transfer.posted.wait(0.25):
            transfer.look()
        if transfer.error is not None:
            failed = first_sentence(transfer.error)
            raise wire.peer_failed(transfer.suspect(), transfer.place, failed) from transfer.error
        return transfer

    def gather(self, place: str, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """All-gather of GPU tensors; ``sizes`` has the elements of each rank."""
        wire = self._wire()
        every = [own.new_empty(size) for size in sizes]
        every[wire.rank] = own
        others = [peer for peer in range(wire.size) if peer != wire.rank]

        def messages(of: Any) -> list[Message]:
            tensors = ((peer, of(peer)) for peer in others)
            return [(peer, 0, x.data_ptr(), x.nbytes) for peer, x in tensors if x.nbytes]

        self.begin(own.device)
        sends, receives = messages(lambda _: own), messages(lambda peer: every[peer])
        if sends or receives:
            stream = torch.cuda.current_stream(own.device).cuda_stream
            self.post_transfer(0, sends, receives, own.device, stream).wait()
        return every

    def _launch(self, transfer: Any) -> Any:
        self._transfers.put(transfer)
        return transfer

    def stale(self) -> Optional[tuple[int, float]]:
        """A rank whose last heartbeat is too old, if any, and its age in seconds."""
        return None if self.heartbeat is None else self.heartbeat.look(self._wire())

    def abort(self) -> None:
        """Aborts all communicators of the group in this process, with everything in flight."""
        if self._aborted or self._poster is None:
            return
        self._aborted = True
        abort = getattr(self._backend, "abort", None) or getattr(self._backend, "_abort", None)
        if abort is not None:
            thread = threading.Thread(target=_ignore_errors, args=(abort,), daemon=True)
            thread.start()
            thread.join(timeout=_ABORT_TIMEOUT)


class Heartbeat:
    """Sends this rank's heartbeats through the store, and checks those of the others."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.passes, self.round = 0, 0
        self.timeout = timeout
        self._rank, self._size = rank, size
        # (last heartbeat, when it was first seen) of every rank.
        self._seen: dict[int, tuple[Any, float]] = {}
        self._looked = 0.0
        stop = threading.Event()
        arguments = (weakref.ref(self), store, rank, stop)
        thread = threading.Thread(target=_beat, args=arguments, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, stop, thread)

    def next_pass(self) -> None:
        """Records that this rank has begun another pass."""
        self.passes, self.round = self.passes + 1, 0

    def look(self, wire: Wire) -> Optional[tuple[int, float]]:
        """A rank whose last heartbeat is too old, if any, and its age in seconds."""
        now = time.monotonic()
        if now - self._looked < _HEARTBEAT_INTERVAL:
            return None
        self._looked = now
        keys = [_heartbeat_key(rank) for rank in range(self._size)]
        store = wire.store
        every = wire.query_store(
            lambda: [store.get(key) if store.check([key]) else None for key in keys]
        )
        for rank, beat in enumerate(every or ()):
            if beat is not None and self._seen.get(rank, (None, 0))[0] != beat:
                self._seen[rank] = (beat, now)
        since = {rank: now - when for rank, (_, when) in self._seen.items() if rank != self._rank}
        stale = max(since, key=since.__getitem__, default=None)
        return (stale, since[stale]) if stale is not None and since[stale] > self.timeout else None

    def furthest_behind(self, among: Sequence[int]) -> int:
        """The rank with the least progress by its last heartbeat; of equals, one of ``among``."""

        def progress(rank: int) -> tuple[Any, bool]:
            beat = self._seen.get(rank)
            passes_and_round = (0, 0) if beat is None else tuple(json.loads(beat[0])[1:])
            return passes_and_round, rank not in among

        return min((rank for rank in range(self._size) if rank != self._rank), key=progress)


class NcclConnect(Transfer):
    """An all-reduce over the group, which makes NCCL connect all ranks."""

    def __init__(self, wire: Wire, place: str, device: torch.device) -> None:
        super().__init__(wire, place)
        self.device = device
        self.peers = [rank for rank in range(wire.size) if rank != wire.rank]
        self.posted = threading.Event()
        self.error: Optional[Exception] = None
        self._works: Sequence[Any] = ()
        # Recorded on the stream after the operation.
        self._end = torch.cuda.Event()
        # When torch first reported completion although the event has not been reached.
        self._ended: Optional[float] = None

    def stream(self) -> torch.cuda.Stream:
        """The stream that the operation is ordered with."""
        return torch.cuda.Stream(self.device)

    def post(self) -> None:
        """Runs on the posting thread."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream()):
                self._works = self.enqueue()
                # Makes the stream wait, not the host.
                for work in self._works:
                    work.wait()
                self._end.record()
        except Exception as error:
            self.error = error
        self.posted.set()

    def enqueue(self) -> Sequence[Any]:
        """Enqueues the operation, and returns torch's work handles."""
        one = torch.ones(1, device=self.device)
        return [dist.all_reduce(one, group=self.wire.group, async_op=True)]

    def completed(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        if not self.posted.wait(seconds):
            return False
        pause = 2e-5
        while self.error is None and not self._end.query():
            now = time.monotonic()
            if now > until:
                self._look_for_errors(now)
                return self.error is not None
            time.sleep(pause)
            pause = min(1.2 * pause, 1e-3)
        return True

    def _look_for_errors(self, now: float) -> None:
        """After an NCCL error torch reports completion although the GPU has not finished."""
        if not all(work.is_completed() for work in self._works):
            return
        self._ended = self._ended or now
        if now - self._ended > 1.0:
            self.error = RuntimeError("NCCL ended the hop with an error")

    def failure(self) -> Optional[tuple[int, str]]:
        return None if self.error is None else (self.suspect(), first_sentence(self.error))

    def suspect(self) -> int:
        return self.wire.gpu.heartbeat.furthest_behind(self.peers)


class GpuTransfer(NcclConnect):
    """Messages of a round from and to GPU memory."""

    def __init__(
        self,
        wire: Wire,
        place: str,
        device: torch.device,
        stream: int,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        super().__init__(wire, place, device)
        self._stream = stream
        self._messages = ((dist.irecv, receives), (dist.isend, sends))
        self.peers = [peer for peer, *_ in (*receives, *sends)]

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._stream, device=self.device)

    def enqueue(self) -> Sequence[Any]:
        group = self.wire.group
        ranks = dist.get_process_group_ranks(group)
        batch = [
            dist.P2POp(direction, _gpu_bytes(address, count, self.device), ranks[peer], group)
            for direction, messages in self._messages
            for peer, _, address, count in messages
        ]
        return dist.batch_isend_irecv(batch)


class _GpuMemory:
    """GPU memory with the CUDA array interface, which torch can read in place."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _gpu_bytes(address: int, count: int, device: torch.device) -> torch.Tensor:
    """GPU memory as a byte tensor, without a copy."""
    return torch.as_tensor(_GpuMemory(address, count), device=device)


def _heartbeat_key(rank: int) -> str:
    return f"encke/alive/{rank}"


def _beat(
    heartbeat: weakref.ref[Heartbeat], store: dist.Store, rank: int, stop: threading.Event
) -> None:
    """Main loop of the heartbeat thread; it ends if the store does not answer."""
    count = 0
    while not stop.is_set() and (own := heartbeat()) is not None:
        count += 1
        beat = json.dumps([count, own.passes, own.round])
        del own
        try:
            store.set(_heartbeat_key(rank), beat)
        except Exception:
            return
        stop.wait(_HEARTBEAT_INTERVAL)


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if threading.current_thread() is not thread:
        thread.join(timeout=1.0)


def _post_all(transfers: queue.SimpleQueue[Any]) -> None:
    """Main loop of the posting thread."""
    while (transfer := transfers.get()) is not None:
        transfer.post()
        del transfer


def _end(transfers: queue.SimpleQueue[Any], poster: threading.Thread) -> None:
    transfers.put(None)
    if threading.current_thread() is not poster:
        poster.join(timeout=1.0)


def _ignore_errors(work: Any) -> None:
    try:
        work()
    except Exception:
        pass
