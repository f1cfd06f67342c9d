"""Rings over NCCL: a GPU for each process, or one for all where NCCL can. The cases are in ring_cases.py."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
    pytest.skip("torch sees no GPU, or has no NCCL", allow_module_level=True)

CASES = Path(__file__).parent / "ring_cases.py"


def version():
    """That of the NCCL that is loaded, which need not be the one torch was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


def wants(ranks):
    """So many ranks need as many GPUs; since 2.30 NCCL lets several share one, if told to."""
    if torch.cuda.device_count() < ranks and version() < (2, 30):
        major, minor = version()
        pytest.skip(f"{ranks} ranks, {torch.cuda.device_count()} GPUs, and NCCL is {major}.{minor}")


def run(*command):
    environment = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1")
    ran = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rings_equal_one_process(ranks):
    wants(ranks)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run(*launch, str(CASES), "nccl")


def test_a_rank_that_is_lost_is_named_by_every_other():
    wants(3)
    run(str(CASES), "lost", "nccl")
