"""The cost of a call from Python beside the library's own work: bench/python_overhead.py [CALLS]

Each call of encke.attention is timed by Python; the extension adds up the time spent in the library
during the same calls. The difference is everything else: reading the tensors and the options,
autograd, and making tensors of the results. Inputs are tiny, so that there is little attention.
Prints microseconds: those of the least disturbed tenth of all batches, and the median difference.
"""

import statistics
import sys
import time

import numpy
import torch

import encke
from encke.options import find, from_keywords

OPTIONS = dict(causal=True)
SHAPE = (1, 8, 1, 8)
BATCHES = 400


def batch(call, calls, found):
    """Microseconds of a call in the library and in all."""
    library = found.library_seconds
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    return 1e6 * (found.library_seconds - library) / calls, 1e6 * seconds / calls


def against(name, call, calls):
    found = find(tuple(from_keywords(dict(OPTIONS))))
    batch(call, calls, found)
    batches = [batch(call, calls, found) for _ in range(BATCHES)]
    differences = sorted(all - own for own, all in batches)
    quiet = sorted(batches, key=lambda times: times[1] - times[0])[: BATCHES // 10]
    library, python = (statistics.median(times) for times in zip(*quiet))
    median = statistics.median(differences)
    print(f"{name:34}{library:12.1f}{python:12.1f}{python - library:12.1f}{median:12.1f}")


def main():
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"microseconds a call, {list(SHAPE)} float32, causal; torch {torch.__version__}")
    print(f"{'':34}{'library':>12}{'all':>12}{'difference':>12}{'median':>12}")
    arrays = [numpy.ones(SHAPE, dtype=numpy.float32) for _ in range(3)]
    tensors = [torch.from_numpy(array) for array in arrays]
    wanted = [tensor.clone().requires_grad_() for tensor in tensors]
    against("NumPy", lambda: encke.attention(*arrays, **OPTIONS), calls)
    against("torch", lambda: encke.attention(*tensors, **OPTIONS), calls)
    against("torch, gradients wanted", lambda: encke.attention(*wanted, **OPTIONS), calls)


if __name__ == "__main__":
    main()
