"""Examples in docstrings and in the README run as printed."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import encke

MODULES = ["encke"] + [
    module.name
    for module in pkgutil.walk_packages(encke.__path__, "encke.")
    if module.name not in ("encke.__main__", "encke._encke")
]

NEEDS_TRANSFORMERS = ("encke.transformers", "encke.integrations.transformers")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_public_functions_have_examples():
    tried = [doctest.testmod(importlib.import_module(name)).attempted for name in MODULES[:1]]
    assert tried[0] >= 8
    tried = doctest.testmod(importlib.import_module("encke.functional")).attempted
    assert tried >= 15


README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readme(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
