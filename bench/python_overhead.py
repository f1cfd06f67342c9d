"""What a call from Python costs beside the library's own: bench/python_overhead.py [CALLS]

Takes turns: a batch of calls of the library alone, timed inside the extension, and as many calls of
encke.attention, timed by Python. Tiny inputs, so that there is as little attention in both as can be.
Prints medians in microseconds, and the median of the differences from turn to turn.
"""

import statistics
import sys
import time

import numpy
import torch

import encke
from encke.options import find, gathered

OPTIONS = dict(causal=True)
SHAPE = (1, 8, 1, 8)
TURNS = 40


def timed(call, calls):
    """Median seconds of a call."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def against(name, tensors, call, calls):
    library = find(tuple(gathered(dict(OPTIONS))))
    rust, python = [], []
    for _ in range(TURNS):
        rust.append(statistics.median(library.seconds(*tensors, calls)))
        python.append(timed(call, calls))
    difference = statistics.median(p - r for p, r in zip(python, rust))
    numbers = (statistics.median(rust), statistics.median(python), difference)
    print(f"{name:34}" + "".join(f"{1e6 * x:14.1f}" for x in numbers))
    return difference


def main():
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"microseconds, {list(SHAPE)} float32, causal; torch {torch.__version__}")
    print(f"{'':34}{'library':>14}{'Python':>14}{'difference':>14}")
    arrays = [numpy.ones(SHAPE, dtype=numpy.float32) for _ in range(3)]
    tensors = [torch.from_numpy(array) for array in arrays]
    wanted = [tensor.clone().requires_grad_() for tensor in tensors]
    against("NumPy", arrays, lambda: encke.attention(*arrays, **OPTIONS), calls)
    against("torch", tensors, lambda: encke.attention(*tensors, **OPTIONS), calls)
    against("torch, gradients wanted", wanted, lambda: encke.attention(*wanted, **OPTIONS), calls)


if __name__ == "__main__":
    main()
