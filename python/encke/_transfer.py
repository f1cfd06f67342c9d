"""Messages in flight: how long a rank waits for them, and which rank is at fault if they do not
arrive.

A wait never lasts longer than the group's timeout, and ends early if a failure was reported.
Transfers from and to host memory are waited for by a separate thread, because torch's wait can be
neither polled nor interrupted.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from encke._wire import Wire

# Seconds between two checks for reported failures; a faster hop is never checked.
_POLL_INTERVAL = 0.25
# Seconds to wait for a report of the failure: a connection can close before its reason is reported.
GRACE = 1.0
# The share of the group's timeout after which a hop has failed, GRACE included: before torch closes
# every connection, which would look as if this rank had died.
_TIMEOUT_SHARE = 0.95


class Transfer:
    """Messages in flight."""

    def __init__(self, wire: Wire, place: str) -> None:
        self.wire = wire
        self.place = place
        self._timeout = max(_TIMEOUT_SHARE * wire.timeout - GRACE, wire.timeout / 2)
        self._until = time.monotonic() + self._timeout

    def completed(self, seconds: float) -> bool:
        """Waits at most this long; whether all messages have completed or failed."""
        raise NotImplementedError

    def suspect(self) -> int:
        """The rank that this rank waits for."""
        raise NotImplementedError

    def failure(self) -> Optional[tuple[int, str]]:
        """The failed rank and the reason, after completion."""
        return None

    def look(self) -> None:
        """Raises if a failure is known, so that waiting is useless."""
        wire = self.wire
        if (reported_failure := wire.reported_failure()) is not None:
            raise wire.error(reported_failure)
        if time.monotonic() > self._until:
            seconds = f"{self._timeout:.3g} s (the group's timeout is {wire.timeout:.3g} s)"
            raise wire.peer_failed(self.suspect(), self.place, f"no answer for {seconds}")
        if wire.store_lost and wire.store_host is not None:
            reason = "the process group's store, which it hosts, does not answer"
            raise wire.peer_failed(wire.store_host, self.place, reason)
        if wire.gpu is not None and (stale := wire.gpu.stale()) is not None:
            reason = f"no heartbeat for {stale[1]:.3g} s"
            raise wire.peer_failed(stale[0], self.place, reason)

    def wait(self) -> None:
        """Returns when every message has completed, or raises an error that names the failed
        rank."""
        while not self.completed(_POLL_INTERVAL):
            self.look()
        if (failure := self.failure()) is not None:
            raise self.wire.peer_failed(failure[0], self.place, failure[1])


class HostTransfer(Transfer):
    """Messages of a round from and to host memory."""

    def __init__(self, wire: Wire, place: str) -> None:
        super().__init__(wire, place)
        self.works: list[tuple[int, Any, torch.Tensor]] = []
        self.current = wire.rank
        self.failed: Optional[tuple[int, str]] = None
        self.done = threading.Event()

    def completed(self, seconds: float) -> bool:
        return self.done.wait(seconds)

    def suspect(self) -> int:
        """The last rank in the chain of ranks that wait for one another."""
        return self.wire.last_waited_for(self.current)

    def failure(self) -> Optional[tuple[int, str]]:
        return self.failed

    def look(self) -> None:
        self.wire.publish_waiting_for(self.current)
        super().look()

    def wait(self) -> None:
        super().wait()
        self.wire.publish_waiting_for(None)


class StoreGather(Transfer):
    """An all-gather through the group's store: for few bytes, and rarely."""

    def __init__(self, wire: Wire, place: str, number: int) -> None:
        super().__init__(wire, place)
        self._number = number
        self._missing = list(range(wire.size))

    def _key(self, number: int, rank: int) -> str:
        return f"encke/gather/{number}/{rank}"

    def write(self, text: bytes) -> None:
        """Stores this rank's bytes, and deletes those of two gathers before, which all have
        read."""
        wire, store = self.wire, self.wire.store
        wire.query_store(lambda: store.set(self._key(self._number, wire.rank), text))
        if self._number > 2:
            wire.query_store(lambda: store.delete_key(self._key(self._number - 2, wire.rank)))

    def completed(self, seconds: float) -> bool:
        store, until, pause = self.wire.store, time.monotonic() + seconds, 5e-4
        while True:
            keys = [self._key(self._number, rank) for rank in self._missing]
            stored = self.wire.query_store(lambda: [store.check([key]) for key in keys])
            if stored is not None:
                self._missing = [rank for rank, done in zip(self._missing, stored) if not done]
            if not self._missing:
                return True
            if self.wire.store_lost or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def read(self) -> list[bytes]:
        """The bytes of every rank."""
        wire, store = self.wire, self.wire.store
        keys = [self._key(self._number, rank) for rank in range(wire.size)]
        texts = wire.query_store(lambda: [store.get(key) for key in keys])
        if texts is None:
            host = wire.rank if wire.store_host is None else wire.store_host
            raise wire.peer_failed(host, self.place, "the process group's store does not answer")
        return texts

    def suspect(self) -> int:
        return self._missing[0]


def wait_all(transfers: queue.SimpleQueue[Optional[HostTransfer]]) -> None:
    """Main loop of the waiting thread."""
    while (transfer := transfers.get()) is not None:
        _wait_one(transfer)
        # Frees the transfer before waiting for the next one.
        del transfer


def _wait_one(transfer: HostTransfer) -> None:
    for peer, work, _ in transfer.works:
        transfer.current = peer
        try:
            work.wait()
        except Exception as error:
            transfer.failed = (peer, first_sentence(error))
            break
    transfer.done.set()


def end(transfers: queue.SimpleQueue[Optional[HostTransfer]], waiter: threading.Thread) -> None:
    """Ends the waiting thread, unless it waits for a message that never arrives."""
    transfers.put(None)
    if threading.current_thread() is not waiter:
        waiter.join(timeout=1.0)


def first_sentence(error: BaseException) -> str:
    """The first sentence of torch's message, without the source location."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = text.rsplit("] ", 1)[-1] if text.startswith("[") else text
    return text.split(". ", 1)[0]
