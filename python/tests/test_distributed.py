"""Rings over processes equal one process, and never hang. The cases are in ring_cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import encke.distributed as ring  # noqa: E402

CASES = Path(__file__).parent / "ring_cases.py"
RANKS = [2, 3, 4] if "ENCKE_LONG" in os.environ else [2, 3]


@pytest.mark.parametrize("ranks", RANKS)
def test_rings_equal_one_process(ranks):
    """Under torchrun, as users start it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(CASES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)


def test_every_rank_names_the_failed_rank():
    """A rank is killed, stopped or fails: every other rank raises within the timeout."""
    ran = subprocess.run(
        [sys.executable, str(CASES), "lost"], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)


def test_shards_without_processes():
    tokens = torch.arange(11)
    for kind in ("contiguous", "zigzag", "striped"):
        sizes = ring.sizes_of(11, ranks=3, sharding=kind)
        shards = [ring.shard(tokens, dim=0, sharding=kind, ranks=3, rank=rank) for rank in range(3)]
        assert [len(shard) for shard in shards] == sizes
        assert torch.equal(torch.cat(shards).sort().values, tokens)
    # Contiguous rows are not copied.
    assert ring.shard(tokens, dim=0, ranks=3, rank=1).data_ptr() == tokens[4:].data_ptr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sizes=[4, 4, 4]), "12 rows of 3 ranks, but there are 11"),
        (dict(sizes=[5, 6]), "11 rows of 2 ranks"),
        (dict(sharding="zigzag", sizes=[4, 4, 3]), r"gives the ranks \[3, 4, 4\] rows"),
        (dict(sharding="diagonal"), "known"),
        (dict(rank=3), "no rank 3"),
    ],
)
def test_invalid_shards_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ring.shard(torch.arange(11), dim=0, **{"ranks": 3, "rank": 0, **options})


def test_a_missing_group_is_an_error():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="torchrun"):
        ring.ring_attention(q, q, q)


def test_attention_dropout_is_refused():
    with pytest.raises(ValueError, match="0.1"):
        ring.RingDilatedAttention([4], [1], attention_dropout=0.1)


def test_the_language_model_has_the_same_losses_on_one_and_two_processes(tmp_path):
    """The example with fewer steps, and the drop-in example."""
    examples = Path(__file__).parents[1] / "examples"
    # A text that does not change: some texts make rounding grow faster than others.
    text = Path(__file__).parents[2] / "LICENSE-APACHE"
    script = [str(examples / "longnet_lm.py"), str(text), "--tokens=150", "--steps=4"]
    script.append(f"--folder={tmp_path}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command in (script, [*torchrun, *script], [str(examples / "drop_in.py")]):
        ran = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    one, two = (
        [float(line.split(",")[1]) for line in (tmp_path / f"loss-{ranks}.csv").read_text().split()]
        for ranks in (1, 2)
    )
    assert len(one) == 4 and one[-1] < one[0]
    assert all(abs(a - b) < 1e-4 for a, b in zip(one, two)), (one, two)
    drawn = (tmp_path / "loss.svg").read_text()
    assert drawn.count("<polyline") == 2 and "2 processes" in drawn
