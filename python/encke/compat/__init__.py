"""Encke in the place of other packages' attention, inside their own models.

:mod:`encke.compat.torchscale`
    The dilated attention of torchscale's LongNet, and of packages that contain a copy of it, such
    as prov-gigapath's slide encoder.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "torchscale":
        return importlib.import_module("encke.compat.torchscale")
    raise AttributeError(f"module 'encke.compat' has no attribute {name!r}")
