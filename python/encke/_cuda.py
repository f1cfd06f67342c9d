"""What the extension needs to know of torch's CUDA: its compiler and its current stream.

The extension searches for NVRTC, CUDA's run-time compiler, in the usual toolkit directories; the
wheels of torch bring it in a Python package, whose directory only Python knows.
"""

import functools
import importlib.util
import os
from pathlib import Path

import torch


@functools.cache
def prepare() -> None:
    """Sets ENCKE_NVRTC to torch's NVRTC, unless it is set."""
    if "ENCKE_NVRTC" in os.environ:
        return
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        found = sorted(Path(folder).glob("*/lib/libnvrtc.so.1[23]"))
        if found:
            os.environ["ENCKE_NVRTC"] = str(found[-1])
            return


def _public_current_stream(gpu: int) -> int:
    return torch.cuda.current_stream(gpu).cuda_stream


# As torch's own compiled code asks for it, without an object for the stream: a tenth of the time.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)


__all__ = ["current_stream", "prepare"]
