"""The command: ``python -m encke.conformance module:function``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from encke import conformance
from encke.conformance import PROMISES, Outcome, Promise

# What a process ends with.
_NEVER_BEGAN, _HANGS = 1, 3
_GRAVE = ("wrong", "failed", "hangs", "crashed")
_VERDICTS = ("holds", *_GRAVE, "refused", "not offered")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m encke.conformance",
        description=conformance.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", help="module:function, a module on the path or in this folder")
    parser.add_argument("--ranks", type=int, default=2, help="processes, unless torchrun starts it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", help="promises whose names contain this")
    parser.add_argument("--seconds", type=float, default=60.0, help="after these a promise hangs")
    parser.add_argument("--json", help="also write the outcomes to this file")
    return parser.parse_args()


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SystemExit(f"{name!r} names no function; write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise SystemExit(f"{module} cannot be imported: {error}") from error
    if not callable(found):
        raise SystemExit(f"{module} has no function {attribute}")
    return found


def main() -> int:
    given = _arguments()
    promises = [of for of in PROMISES if given.only is None or given.only in of.name]
    if not promises:
        names = "; ".join(of.name for of in PROMISES)
        raise SystemExit(f"no promise contains {given.only!r}; there are: {names}")
    _function(given.function)
    if "RANK" in os.environ:
        return _as_rank(given, promises)
    outcomes: list[Outcome] = []
    while len(outcomes) < len(promises):
        before = len(outcomes)
        code = _as_launcher(given, before, outcomes)
        if code != 0 and len(outcomes) < len(promises):
            if code == _NEVER_BEGAN and len(outcomes) == before:
                raise SystemExit(f"the processes ended with code {code} before the first promise")
            verdict, detail = ("hangs", f"more than {given.seconds:g} s")
            if code != _HANGS:
                verdict, detail = ("crashed", f"a process ended with code {code}")
            outcomes.append(Outcome(promises[len(outcomes)].name, verdict, detail))
    _print(given, given.ranks, outcomes)
    return int(any(of.verdict in _GRAVE for of in outcomes))


def _as_launcher(given: argparse.Namespace, first: int, outcomes: list[Outcome]) -> int:
    """Starts the ranks from a promise on, adds their outcomes, and returns the first bad code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "outcomes")
        shared = dict(os.environ, WORLD_SIZE=str(given.ranks), MASTER_ADDR="127.0.0.1")
        shared.update(MASTER_PORT=str(port), ENCKE_FIRST=str(first), ENCKE_OUTCOMES=path)
        shared.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "encke.conformance", *sys.argv[1:]]
        ranks = [
            subprocess.Popen(command, env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(given.ranks)
        ]
        code = _wait(ranks)
        if os.path.exists(path):
            with open(path) as file:
                outcomes += [Outcome(*json.loads(line)) for line in file]
        return code


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks; if one fails, the others have three seconds."""
    left, code = list(ranks), 0
    deadline = None
    while left:
        left = [rank for rank in left if rank.poll() is None]
        bad = [rank.returncode for rank in ranks if rank.returncode not in (None, 0)]
        if bad and deadline is None:
            code, deadline = bad[0], time.monotonic() + 3
        if deadline is not None and time.monotonic() > deadline:
            for rank in left:
                rank.kill()
        time.sleep(0.02)
    return code


def _as_rank(given: argparse.Namespace, promises: list[Promise]) -> int:
    """One rank, of torchrun or of the launcher, which wants outcomes in a file."""
    path, first = os.environ.get("ENCKE_OUTCOMES"), int(os.environ.get("ENCKE_FIRST", 0))
    device, backend = torch.device("cpu"), "gloo"
    if given.device == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
        # NCCL takes one process for each GPU; gloo copies through the host.
        if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= gpus:
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    function, watch = _function(given.function), _Watch(given.seconds)
    outcomes = []
    for promise in promises[first:]:
        watch.start(promise)
        outcomes += conformance.check(function, device, promises=[promise])
        if path is not None and dist.get_rank() == 0:
            with open(path, "a") as file:
                file.write(json.dumps(outcomes[-1]) + "\n")
        if path is not None and outcomes[-1].verdict in ("failed", "refused"):
            # Messages of that call may still be under way: the next promise gets new processes.
            break
    watch.stop()
    if path is not None:
        dist.destroy_process_group()
        return 0
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        _print(given, ranks, outcomes)
    dist.destroy_process_group()
    return int(any(of.verdict in _GRAVE for of in outcomes))


class _Watch:
    """Ends the process, with every thread's stack, if a promise takes too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: Any = None

    def start(self, promise: Promise) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._end, [promise.name])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, name: str) -> None:
        note = f"{name}: hangs (more than {self._seconds:g} s)"
        print(note, file=sys.stderr, flush=True)
        if "ENCKE_OUTCOMES" not in os.environ:
            faulthandler.dump_traceback(file=sys.stderr)
        os._exit(_HANGS)


def _print(given: argparse.Namespace, ranks: int, outcomes: list[Outcome]) -> None:
    width = max(len(of.promise) for of in outcomes)
    print(f"{given.function} on {ranks} processes ({given.device})")
    for promise, verdict, detail in outcomes:
        print(f"  {promise:<{width}}  {verdict}{': ' + detail if detail else ''}")
    count = Counter(of.verdict for of in outcomes)
    print(", ".join(f"{count[verdict]} {verdict}" for verdict in _VERDICTS if count[verdict]))
    if given.json:
        text = json.dumps(dict(function=given.function, ranks=ranks, device=given.device,
                               outcomes=[of._asdict() for of in outcomes]), indent=1)
        with open(given.json + ".part", "w") as file:
            file.write(text + "\n")
        os.replace(given.json + ".part", given.json)


if __name__ == "__main__":
    sys.exit(main())
