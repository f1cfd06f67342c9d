"""What a GPU needs that torch has brought along: NVRTC, CUDA's run-time compiler.

The extension looks where toolkits are; a wheel of torch has the compiler beside itself, in a place only
Python can tell.
"""

import functools
import importlib.util
import os
from pathlib import Path


@functools.cache
def prepare() -> None:
    """Tells the extension where NVRTC is, unless the user has."""
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
