"""Rings over NCCL: a GPU for each process, or one for all where NCCL can. The cases are in ring_cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
    pytest.skip("torch sees no GPU, or has no NCCL", allow_module_level=True)

CASES = Path(__file__).parent / "ring_cases.py"


def can(ranks):
    """Whether so many ranks find a GPU; since 2.30 NCCL lets several share one, if told to."""
    return torch.cuda.device_count() >= ranks or torch.cuda.nccl.version() >= (2, 30)


def run(*command):
    environment = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1")
    ran = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rings_equal_one_process(ranks):
    if not can(ranks):
        pytest.skip(f"{torch.cuda.device_count()} GPUs, and NCCL {torch.cuda.nccl.version()} wants {ranks}")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run(*launch, str(CASES), "nccl")


def test_a_rank_that_is_lost_is_named_by_every_other():
    if not can(3):
        pytest.skip(f"{torch.cuda.device_count()} GPUs, and NCCL {torch.cuda.nccl.version()} wants 3")
    run(str(CASES), "lost", "nccl")
