"""Models of transformers on sequences that processes share equal one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

HERE = Path(__file__).parent
# context_cases.py compares every model; the example runs with the one that has windows and sinks.
LONG = "ENCKE_LONG" in os.environ
MODELS = ["llama", "gemma3", "gpt-oss"] if LONG else ["gpt-oss"]
RANKS, STEPS = ([1, 2, 4], 20) if LONG else ([1, 2], 6)


def torchrun(ranks, *command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *map(str, command)],
        capture_output=True, text=True, timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_equals_one_process(ranks):
    print(torchrun(ranks, HERE / "context_cases.py"))


def check_losses(example, model):
    """Equal losses on one process and on several."""
    losses = []
    for ranks in RANKS:
        path = HERE.parent / "examples" / example
        lines = torchrun(ranks, path, f"--steps={STEPS}", f"--model={model}").split("\n")
        losses.append([float(line.split(",")[1]) for line in lines if "," in line[:3]])
    assert len(losses[0]) == STEPS and losses[0][-1] < losses[0][0]
    for others in losses[1:]:
        assert len(others) == STEPS
        for one, of in zip(losses[0], others):
            assert abs(one - of) <= 1e-5 * one, losses


@pytest.mark.parametrize("model", MODELS)
def test_the_example_has_the_same_losses_on_one_process_and_on_several(model):
    check_losses("context_parallel.py", model)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_trainer_has_the_same_losses_on_one_process_and_on_several(model):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    check_losses("trainer.py", model)
