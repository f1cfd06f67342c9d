"""Hops between GPUs over the group's NCCL: from the memory of one to the memory of another.

A hop is one batch of sends and receives on the group's own stream, between two points of a stream of the
library's: nothing is staged, and the host looks on only because a deadline needs somebody who looks at
the clock. NCCL says nothing of a process that has died on the other side of a machine's memory: its
kernels wait. So every rank gives signs of life in the group's store, with how far it has come, and whoever
waits looks there; the rank that is silent, or furthest behind when the time is up, is the one to blame.
A failure ends the group's communicators (``abort``), because what they wait for will not come and torch
would end the process for it.

Posting is done by a thread of its own: the first hop between two ranks connects them, and can wait for
one that never comes.
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

from encke._flight import Flight, first_words

if TYPE_CHECKING:
    from encke._wire import Wire

# Seconds between two signs of life, and between two looks for those of others.
_BEAT = 1.0
# Seconds without one after which a rank is taken for dead, unless the group's timeout is shorter.
_SILENCE = 30.0
# Seconds that ending the communicators may take before it is left to itself.
_SEPARATION = 10.0

Message = tuple[int, int, int, int]


class GpuWire:
    """The hops of one rank between GPUs."""

    def __init__(self, wire: Wire, backend: Any) -> None:
        self._wire = weakref.ref(wire)
        self._backend = backend
        self._separated = False
        # GPUs on which all ranks have met: NCCL wants everyone there before any two may talk.
        self._met: set[int] = set()
        self._flights: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._poster: Optional[threading.Thread] = None
        self.signs: Optional[Signs] = None

    def begin(self, device: torch.device) -> None:
        """Begins a pass on this GPU; the first one brings all ranks together."""
        wire = self._wire()
        if self._poster is None:
            self._poster = threading.Thread(target=_post_all, args=(self._flights,), daemon=True)
            self._poster.start()
            weakref.finalize(self, _end, self._flights, self._poster)
            self.signs = Signs(wire.store, wire.rank, wire.size, min(_SILENCE, wire.timeout / 3))
        self.signs.next_pass()
        number = device.index
        if wire.size > 1 and number not in self._met:
            self._launch(Collectives(wire, "meeting the others", device)).wait()
            self._met.add(number)

    def fly(
        self,
        round: int,
        sends: Sequence[Message],
        receives: Sequence[Message],
        device: torch.device,
        stream: int,
    ) -> GpuFlight:
        """Posts (peer, tag, address, bytes), which come in the same order at both ends."""
        wire = self._wire()
        self.signs.round = round + 1
        flight = self._launch(GpuFlight(wire, f"round {round}", device, stream, sends, receives))
        # What the library enqueues next on this stream comes after the hops, so they must be there.
        while not flight.posted.wait(0.25):
            flight.look()
        if flight.error is not None:
            failed = first_words(flight.error)
            raise wire.lost(flight.blamed(), flight.place, failed) from flight.error
        return flight

    def gather(self, place: str, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Everyone's numbers on the GPU, which are as many as ``sizes`` says, at everyone."""
        wire = self._wire()
        every = [own.new_empty(size) for size in sizes]
        every[wire.rank] = own
        others = [peer for peer in range(wire.size) if peer != wire.rank]

        def messages(of: Any) -> list[Message]:
            told = ((peer, 0, of(peer)) for peer in others)
            return [(peer, tag, x.data_ptr(), x.nbytes) for peer, tag, x in told if x.nbytes]

        self.begin(own.device)
        sends, receives = messages(lambda _: own), messages(lambda peer: every[peer])
        if sends or receives:
            stream = torch.cuda.current_stream(own.device).cuda_stream
            self.fly(0, sends, receives, own.device, stream).wait()
        return every

    def _launch(self, flight: Any) -> Any:
        self._flights.put(flight)
        return flight

    def silent(self) -> Optional[tuple[int, float]]:
        """A rank that has shown no sign of life for too long, if there is one, and for how long."""
        return None if self.signs is None else self.signs.look(self._wire())

    def separate(self) -> None:
        """Ends all communicators of the group here, with whatever is under way."""
        if self._separated or self._poster is None:
            return
        self._separated = True
        abort = getattr(self._backend, "abort", None) or getattr(self._backend, "_abort", None)
        if abort is not None:
            thread = threading.Thread(target=_quietly, args=(abort,), daemon=True)
            thread.start()
            thread.join(timeout=_SEPARATION)


class Signs:
    """This rank's signs of life, and a look at those of the others."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float) -> None:
        self.passes, self.round = 0, 0
        self.patience = patience
        self._rank, self._size = rank, size
        # (sign, when it was first seen) of every rank.
        self._seen: dict[int, tuple[Any, float]] = {}
        self._looked = 0.0
        stop = threading.Event()
        arguments = (weakref.ref(self), store, rank, stop)
        thread = threading.Thread(target=_live, args=arguments, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, stop, thread)

    def next_pass(self) -> None:
        """Notes that this rank has begun another pass."""
        self.passes, self.round = self.passes + 1, 0

    def look(self, wire: Wire) -> Optional[tuple[int, float]]:
        """A rank that has been silent for too long, if there is one, and for how long."""
        now = time.monotonic()
        if now - self._looked < _BEAT:
            return None
        self._looked = now
        keys = [_sign(rank) for rank in range(self._size)]
        store = wire.store
        every = wire.ask(lambda: [store.get(key) if store.check([key]) else None for key in keys])
        for rank, sign in enumerate(every or ()):
            if sign is not None and self._seen.get(rank, (None, 0))[0] != sign:
                self._seen[rank] = (sign, now)
        since = {rank: now - when for rank, (_, when) in self._seen.items() if rank != self._rank}
        silent = max(since, key=since.__getitem__, default=None)
        return (silent, since[silent]) if silent is not None and since[silent] > self.patience else None

    def furthest_behind(self, among: Sequence[int]) -> int:
        """The rank that has done least by its last sign; of equals, one of those that are waited for."""

        def done(rank: int) -> tuple[Any, bool]:
            sign = self._seen.get(rank)
            passes_and_round = (0, 0) if sign is None else tuple(json.loads(sign[0])[1:])
            return passes_and_round, rank not in among

        return min((rank for rank in range(self._size) if rank != self._rank), key=done)


class Collectives(Flight):
    """Every rank of the group on its GPU: what makes NCCL connect them."""

    def __init__(self, wire: Wire, place: str, device: torch.device) -> None:
        super().__init__(wire, place)
        self.device = device
        self.peers = [rank for rank in range(wire.size) if rank != wire.rank]
        self.posted = threading.Event()
        self.error: Optional[Exception] = None
        self._works: Sequence[Any] = ()
        # The point of the stream that comes after it.
        self._end = torch.cuda.Event()
        # Since when torch says that it has ended, and the stream does not come to its end.
        self._ended: Optional[float] = None

    def stream(self) -> torch.cuda.Stream:
        """What is to come before it and what after is on this stream."""
        return torch.cuda.Stream(self.device)

    def post(self) -> None:
        """On the thread that posts."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream()):
                self._works = self.enqueue()
                # The stream waits, not the host.
                for work in self._works:
                    work.wait()
                self._end.record()
        except Exception as error:
            self.error = error
        self.posted.set()

    def enqueue(self) -> Sequence[Any]:
        """Enqueues what is to be done, and returns torch's handles of it."""
        here = torch.ones(1, device=self.device)
        return [dist.all_reduce(here, group=self.wire.group, async_op=True)]

    def landed(self, seconds: float) -> bool:
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
        """NCCL's errors make torch call a thing ended that the GPU has not done."""
        if not all(work.is_completed() for work in self._works):
            return
        self._ended = self._ended or now
        if now - self._ended > 1.0:
            self.error = RuntimeError("NCCL has ended its hop with an error")

    def failure(self) -> Optional[tuple[int, str]]:
        return None if self.error is None else (self.blamed(), first_words(self.error))

    def blamed(self) -> int:
        return self.wire.gpu.signs.furthest_behind(self.peers)


class GpuFlight(Collectives):
    """Messages of a round from and into a GPU's memory."""

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
            dist.P2POp(direction, _there(address, count, self.device), ranks[peer], group)
            for direction, messages in self._messages
            for peer, _, address, count in messages
        ]
        return dist.batch_isend_irecv(batch)


class _Memory:
    """Bytes on a GPU, as torch takes them from others."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _there(address: int, count: int, device: torch.device) -> torch.Tensor:
    """Bytes of a GPU where they are."""
    return torch.as_tensor(_Memory(address, count), device=device)


def _sign(rank: int) -> str:
    return f"encke/alive/{rank}"


def _live(signs: weakref.ref[Signs], store: dist.Store, rank: int, stop: threading.Event) -> None:
    """The life of the thread that gives signs of it. A store that is gone has nobody to read them."""
    count = 0
    while not stop.is_set() and (own := signs()) is not None:
        count += 1
        word = json.dumps([count, own.passes, own.round])
        del own
        try:
            store.set(_sign(rank), word)
        except Exception:
            return
        stop.wait(_BEAT)


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if threading.current_thread() is not thread:
        thread.join(timeout=1.0)


def _post_all(flights: queue.SimpleQueue[Any]) -> None:
    """The life of the thread that posts."""
    while (flight := flights.get()) is not None:
        flight.post()
        del flight


def _end(flights: queue.SimpleQueue[Any], poster: threading.Thread) -> None:
    flights.put(None)
    if threading.current_thread() is not poster:
        poster.join(timeout=1.0)


def _quietly(work: Any) -> None:
    try:
        work()
    except Exception:
        pass
