"""Failures of this rank reach the others before they are raised here, and Ctrl-C as it arrives.

Python raises KeyboardInterrupt between two of its own instructions, and a round of a long call
computes for seconds without one. So the number of the signal, which Python writes to a file at once
(``signal.set_wakeup_fd``), is read by a thread, which reports it.
"""

from __future__ import annotations

import signal
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from encke._wire import Wire


class Reporting:
    """``with reporting:`` reports every exception to the other ranks before it is raised."""

    def __init__(self, wire: Wire) -> None:
        self._wire = weakref.ref(wire)
        self._signals: Optional[socket.socket] = None

    def __enter__(self) -> None:
        if not _raises_interrupts():
            return
        if self._signals is None:
            self._signals, received = socket.socketpair()
            self._signals.setblocking(False)
            thread = threading.Thread(target=_listen, args=(received, self._wire), daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._signals, thread)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if self._signals is not None and _wakeup_fd() == self._signals.fileno():
            signal.set_wakeup_fd(-1)
        if error is not None and (wire := self._wire()) is not None:
            wire.fail(f"{type(error).__name__}: {error}")


def _wakeup_fd() -> Optional[int]:
    """The file to which signals are written, -1 for none; None outside of the main thread, to which
    signals belong."""
    if threading.current_thread() is not threading.main_thread():
        return None
    current = signal.set_wakeup_fd(-1)
    if current != -1:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    return current


def _raises_interrupts() -> bool:
    """Whether Ctrl-C will raise KeyboardInterrupt here, and no other code, such as asyncio, listens
    for signals."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler and _wakeup_fd() == -1


def _listen(received: socket.socket, wire_of: weakref.ref[Wire]) -> None:
    """Main loop of the thread."""
    with received:
        while numbers := received.recv(64):
            wire = wire_of()
            if wire is not None and signal.SIGINT in numbers:
                wire.announce("KeyboardInterrupt")
            del wire


def _end(signals: socket.socket, listener: threading.Thread) -> None:
    """Ends the thread, before the interpreter ends."""
    signals.close()
    if threading.current_thread() is not listener:
        listener.join(timeout=1.0)
