"""Rings over NCCL, with one GPU per process, or a shared one where NCCL supports it. The cases are
in ring_cases.py."""

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
    """The version of the loaded NCCL, which may differ from the one torch was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


def wants(ranks):
    """Skips without one GPU per rank; since 2.30 several ranks can share one, with a setting."""
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


def test_every_rank_names_the_failed_rank():
    wants(3)
    run(str(CASES), "lost", "nccl")
