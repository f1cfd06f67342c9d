"""Messages that are under way: how long they are waited for, and whose fault it is when they do not come.

A wait never lasts longer than the group's timeout, and ends early where somebody has left word of a
failure. Messages of the host's memory are waited for by a thread of their own, because torch's wait can
be neither polled nor given up.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from encke._wire import Wire

# Seconds between two looks for word of a failure; a hop that is faster never looks.
_POLL = 0.25
# Seconds that word of a failure may take: a connection can close before its reason is known.
GRACE = 1.0
# The part of the group's timeout after which a hop has failed, word of it included: before torch closes
# every connection, which would look as if this rank had died.
_PART = 0.95


class Flight:
    """Messages that are under way: how long they are waited for, and whose fault it is."""

    def __init__(self, wire: Wire, place: str) -> None:
        self.wire = wire
        self.place = place
        self._patience = max(_PART * wire.timeout - GRACE, wire.timeout / 2)
        self._until = time.monotonic() + self._patience

    def landed(self, seconds: float) -> bool:
        """Waits for so long at most, and says whether everything has come and gone, or failed."""
        raise NotImplementedError

    def blamed(self) -> int:
        """The rank that is waited for."""
        raise NotImplementedError

    def failure(self) -> Optional[tuple[int, str]]:
        """Who failed, and why, of what has landed."""
        return None

    def look(self) -> None:
        """Raises where it is known already that waiting is in vain."""
        wire = self.wire
        if (heard := wire.heard()) is not None:
            raise wire.error(heard)
        if time.monotonic() > self._until:
            seconds = f"{self._patience:.3g} s (the group's timeout is {wire.timeout:.3g} s)"
            raise wire.lost(self.blamed(), self.place, f"it did not answer for {seconds}")
        if wire.store_is_gone and wire.store_keeper is not None:
            reason = "the store of the processes, which it keeps, does not answer"
            raise wire.lost(wire.store_keeper, self.place, reason)
        if wire.gpu is not None and (silent := wire.gpu.silent()) is not None:
            reason = f"it has shown no sign of life for {silent[1]:.3g} s"
            raise wire.lost(silent[0], self.place, reason)

    def wait(self) -> None:
        """Returns when every message has come and gone, or raises naming who is to blame."""
        while not self.landed(_POLL):
            self.look()
        if (failure := self.failure()) is not None:
            raise self.wire.lost(failure[0], self.place, failure[1])


class HostFlight(Flight):
    """Messages of a round from and into the host's memory."""

    def __init__(self, wire: Wire, place: str) -> None:
        super().__init__(wire, place)
        self.works: list[tuple[int, Any, torch.Tensor]] = []
        self.current = wire.rank
        self.failed: Optional[tuple[int, str]] = None
        self.done = threading.Event()

    def landed(self, seconds: float) -> bool:
        return self.done.wait(seconds)

    def blamed(self) -> int:
        """The rank that is waited for may itself wait for another, and so on: the last one is meant."""
        return self.wire.last_waited_for(self.current)

    def failure(self) -> Optional[tuple[int, str]]:
        return self.failed

    def look(self) -> None:
        self.wire.waits_for(self.current)
        super().look()

    def wait(self) -> None:
        super().wait()
        self.wire.waits_for(None)


class Letters(Flight):
    """What everyone leaves for everyone in the store: few bytes, and seldom."""

    def __init__(self, wire: Wire, place: str, number: int) -> None:
        super().__init__(wire, place)
        self._number = number
        self._missing = list(range(wire.size))

    def _key(self, number: int, rank: int) -> str:
        return f"encke/letter/{number}/{rank}"

    def write(self, text: bytes) -> None:
        """Leaves this rank's letter, and takes away the one before the last, which all have read."""
        wire, store = self.wire, self.wire.store
        wire.ask(lambda: store.set(self._key(self._number, wire.rank), text))
        if self._number > 2:
            wire.ask(lambda: store.delete_key(self._key(self._number - 2, wire.rank)))

    def landed(self, seconds: float) -> bool:
        store, until, pause = self.wire.store, time.monotonic() + seconds, 5e-4
        while True:
            keys = [self._key(self._number, rank) for rank in self._missing]
            here = self.wire.ask(lambda: [store.check([key]) for key in keys])
            if here is not None:
                self._missing = [rank for rank, is_here in zip(self._missing, here) if not is_here]
            if not self._missing:
                return True
            if self.wire.store_is_gone or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def read(self) -> list[bytes]:
        """Everyone's letter."""
        wire, store = self.wire, self.wire.store
        keys = [self._key(self._number, rank) for rank in range(wire.size)]
        texts = wire.ask(lambda: [store.get(key) for key in keys])
        if texts is None:
            keeper = wire.rank if wire.store_keeper is None else wire.store_keeper
            raise wire.lost(keeper, self.place, "the store of the processes does not answer")
        return texts

    def blamed(self) -> int:
        return self._missing[0]


def land_all(flights: queue.SimpleQueue[Optional[HostFlight]]) -> None:
    """The life of the thread that waits."""
    while (flight := flights.get()) is not None:
        _land(flight)
        # Nothing of it is held on to while the next one is waited for.
        del flight


def _land(flight: HostFlight) -> None:
    for peer, work, _ in flight.works:
        flight.current = peer
        try:
            work.wait()
        except Exception as error:
            flight.failed = (peer, first_words(error))
            break
    flight.done.set()


def end(flights: queue.SimpleQueue[Optional[HostFlight]], waiter: threading.Thread) -> None:
    """Ends the thread that waits, unless it waits for what will never come."""
    flights.put(None)
    if threading.current_thread() is not waiter:
        waiter.join(timeout=1.0)


def first_words(error: BaseException) -> str:
    """The first sentence of what torch says, without its place in torch's source."""
    line = str(error).strip().splitlines()
    words = line[0] if line else type(error).__name__
    words = words.rsplit("] ", 1)[-1] if words.startswith("[") else words
    return words.split(". ", 1)[0]
