"""Rings over processes: equal to one process, and never hanging. The cases are in ring_cases.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import encke.distributed as ring  # noqa: E402

CASES = Path(__file__).parent / "ring_cases.py"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rings_equal_one_process(ranks):
    """Under torchrun, as users start it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(CASES)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)


def launched(ranks, *arguments):
    """Processes without a launcher that would end the others when one has died."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    command = [sys.executable, str(CASES), *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("how", "victim", "seconds"),
    # The second one keeps the processes' store, so that it takes with it what the others would ask.
    [("die", 2, 60), ("die", 0, 60), ("stop", 1, 8), ("fail", 3, 60)],
)
def test_a_rank_that_is_lost_is_named_by_every_other(how, victim, seconds):
    ranks = 4
    processes = launched(ranks, how, victim, seconds)
    begin = time.monotonic()
    try:
        for rank, process in enumerate(processes):
            if rank == victim and how == "stop":
                continue
            said, _ = process.communicate(timeout=120)
            expected = -signal.SIGKILL if (rank, how) == (victim, "die") else 0
            assert process.returncode == expected, said
            if rank != victim:
                assert f"rank {victim} failed" in said, said
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"{how} {victim}: {time.monotonic() - begin:.1f} s")


def test_shards_without_processes():
    tokens = torch.arange(11)
    for kind in ("contiguous", "zigzag", "striped"):
        sizes = ring.sizes_of(11, ranks=3, sharding=kind)
        shards = [ring.shard(tokens, dim=0, sharding=kind, ranks=3, rank=rank) for rank in range(3)]
        assert [len(shard) for shard in shards] == sizes
        assert torch.equal(torch.cat(shards).sort().values, tokens)
    # What lies together is not copied.
    assert ring.shard(tokens, dim=0, ranks=3, rank=1).data_ptr() == tokens[4:].data_ptr()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(sizes=[4, 4, 4]), "12 rows of 3 ranks, but there are 11"),
        (dict(sizes=[5, 6]), "11 rows of 2 ranks"),
        (dict(sharding="zigzag", sizes=[3, 4, 4]), r"gives the ranks \[4, 4, 3\] rows"),
        (dict(sharding="diagonal"), "known"),
        (dict(rank=3), "no rank 3"),
    ],
)
def test_shards_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        ring.shard(torch.arange(11), dim=0, **{"ranks": 3, "rank": 0, **options})


def test_without_a_group_it_says_what_is_missing():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="torchrun"):
        ring.ring_attention(q, q, q)


def test_attention_dropout_is_refused():
    with pytest.raises(ValueError, match="0.1"):
        ring.RingDilatedAttention([4], [1], attention_dropout=0.1)
