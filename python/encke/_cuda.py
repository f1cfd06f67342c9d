"""Finds NVRTC, CUDA's run-time compiler, in the wheels that torch depends on.

The extension searches the usual toolkit directories; torch's wheels bring the compiler in a Python
package, whose directory only Python knows.
"""

import functools
import importlib.util
import os
from pathlib import Path


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


__all__ = ["prepare"]
