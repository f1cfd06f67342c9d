"""Other people's libraries on Encke: :mod:`encke.integrations.transformers`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("encke.integrations.transformers")
    raise AttributeError(f"module 'encke.integrations' has no attribute {name!r}")
