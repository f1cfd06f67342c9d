"""The conformance suite for context parallelism finds mistakes, and none in Encke's ring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

HERE = Path(__file__).parent


def torchrun(ranks, *command, folder=HERE):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *map(str, command)],
        capture_output=True, text=True, timeout=300, cwd=folder,
    )


def test_every_mistake_is_found():
    ran = torchrun(2, HERE / "conformance_cases.py", "right")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_enckes_ring_keeps_every_promise(ranks, tmp_path):
    ran = torchrun(
        ranks, "-m", "encke.conformance", "conformance_adapters:encke_ring",
        f"--json={tmp_path / 'outcomes.json'}", folder=HERE.parent / "examples",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "15 hold, 0 fail, 0 are not offered" in ran.stdout
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert {of["verdict"] for of in outcomes} == {"holds"}


def test_a_promise_that_fails_is_printed_with_its_first_wrong_element():
    ran = torchrun(2, "-m", "encke.conformance", "conformance_cases:means", "--only", "forward")
    assert ran.returncode != 0
    line = next(line for line in ran.stdout.split("\n") if "forward" in line)
    assert "fails" in line and "out at batch 0, token 0, head 0, element 0" in line
