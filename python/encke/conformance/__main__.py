"""``python -m encke.conformance module:function`` under torchrun."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from encke.conformance.promises import PROMISES
from encke.conformance.suite import Offer, run


def main() -> int:
    """Runs the promises; 0 if all that are offered hold."""
    names = [promise.name for promise in PROMISES]
    parser = argparse.ArgumentParser(
        prog="python -m encke.conformance",
        description="Holds a context-parallel attention against a dense float64 reference.",
    )
    parser.add_argument("function", help="module:function, found from the current folder on")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PROMISE")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a rank may wait")
    parser.add_argument("--json", help="also writes the outcomes to this file")
    given = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    _start(given.device, given.timeout)
    offer = Offer.of(_load(given.function))
    chosen = [promise for promise in PROMISES if promise.name in given.only]
    outcomes = []
    first = dist.get_rank() == 0
    if first:
        print(f"{given.function} on {dist.get_world_size()} processes, {given.device}")
    for outcome in run(offer, chosen, given.device):
        outcomes.append(outcome)
        if first:
            print(f"  {outcome.promise:<14} {outcome.verdict:<12} {outcome.text}", flush=True)
    if first and given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump([outcome._asdict() for outcome in outcomes], file, indent=1)
    failed = sum(outcome.verdict in ("fails", "raises", "ends") for outcome in outcomes)
    if first:
        held = sum(outcome.verdict == "holds" for outcome in outcomes)
        print(f"{held} hold, {failed} fail, {len(outcomes) - held - failed} are not offered")
    if any(outcome.verdict == "ends" for outcome in outcomes):
        # A rank may still wait for another; the group cannot be used any more.
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()
    return int(failed > 0)


def _start(device: str, timeout: float) -> None:
    seconds = datetime.timedelta(seconds=timeout)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=seconds)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _load(named: str) -> Any:
    module, colon, name = named.partition(":")
    if not colon:
        raise SystemExit(f"{named} has no colon; give module:function")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
