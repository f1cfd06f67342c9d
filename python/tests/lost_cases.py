"""Rings in which one process dies, stops, fails or is interrupted.

Run by ring_cases.py; not a test by itself."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist

import encke
import encke.distributed as ring
from encke import _transfer, _wire
from ring_cases import raised, start


# Seconds that an interrupted rank computes before Python can raise KeyboardInterrupt.
COMPUTES = 6


def interrupt():
    """Ctrl-C during a computation that Python does not run."""
    # Delivered to another thread, so that the sleep is not cut short.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    ctypes.CDLL(None).sleep(COMPUTES)
    time.sleep(3)
    raise AssertionError("KeyboardInterrupt was not raised")


def failure(how, victim, seconds, backend):
    """One rank dies, stops, fails or is interrupted in the second call; the others must name it."""
    # A shell starts commands in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start(seconds, backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cpu"
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    q = torch.randn(1, 4000, 2, 16, device=device, requires_grad=True)
    ring.ring_attention(q, q, q)
    name = "post_on_gpu" if backend == "nccl" else "post"
    post = getattr(_wire._Call, name)

    def fail(self, round, *rest):
        if round == 1:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "interrupt":
                interrupt()
            raise MemoryError("no memory for it")
        return post(self, round, *rest)

    if (how, rank) == ("stop", (victim + 2) % ranks) and backend == "gloo":
        # A rank that waits for a rank that waits for the victim times out first, and must name the
        # victim.
        _transfer._TIMEOUT_SHARE = 0.7
    if rank == victim:
        setattr(_wire._Call, name, fail)
    begin = time.monotonic()
    try:
        for _ in range(3):
            ring.ring_attention(q, q, q).sum().backward()
    except encke.RingError as error:
        assert rank != victim and error.rank == victim, error
        took = time.monotonic() - begin
        assert "make a new one" not in str(error), error
        print(f"rank {rank} of {ranks} after {took:.1f} s: {error}", flush=True)
        assert took < (COMPUTES if how == "interrupt" else seconds + 10), took
        again = raised(encke.RingError, lambda: ring.ring_attention(q, q, q))
        assert f"rank {victim}" in again and "make a new one" in again, again
    except (MemoryError, KeyboardInterrupt):
        assert rank == victim
        print(f"rank {rank} of {ranks} failed by itself", flush=True)
    else:
        raise AssertionError(f"rank {rank} noticed nothing")
    # No rank exits before all have seen the failure: an exit closes its connections too.
    time.sleep(3)
    os._exit(0)


def lost(how, victim, seconds, backend="gloo", ranks=4):
    """Runs processes without a launcher, which would end the others after a death. They are forked,
    because torch is imported already and nothing else of it has been used."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    processes, words = [], []
    for rank in range(ranks):
        words.append(tempfile.TemporaryFile("w+"))
        processes.append(os.fork())
        if processes[-1] == 0:
            os.dup2(words[-1].fileno(), 1)
            os.dup2(words[-1].fileno(), 2)
            os.environ["RANK"] = str(rank)
            try:
                failure(how, victim, seconds, backend)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
    begin = time.monotonic()
    for rank, process in enumerate(processes):
        if rank == victim and how == "stop":
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        words[rank].seek(0)
        message = words[rank].read()
        assert code == (-signal.SIGKILL if (rank, how) == (victim, "die") else 0), message
        assert rank == victim or f"rank {victim} failed" in message, message
        print(message, end="")
    if how == "stop":
        os.kill(processes[victim], signal.SIGKILL)
        os.waitpid(processes[victim], 0)
    print(f"{how} {victim}: {time.monotonic() - begin:.1f} s", flush=True)


def main(backend):
    # The second victim hosts the store, so that the others lose it too.
    if backend == "gloo":
        for how, victim, seconds in [
            ("die", 2, 60),
            ("die", 0, 60),
            ("stop", 1, 12),
            ("fail", 3, 60),
            ("interrupt", 2, 60),
        ]:
            lost(how, victim, seconds)
    else:
        for how, victim, seconds in [
            ("die", 2, 15),
            ("die", 0, 15),
            ("stop", 1, 15),
            ("fail", 2, 15),
        ]:
            lost(how, victim, seconds, backend, ranks=3)
