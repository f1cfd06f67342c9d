"""Builds the package with maturin, after a check that there is a Rust toolchain to build it with.

Installing from source without one ends with one sentence that says what to do. Without this check
maturin would download a toolchain of its own, or fail after pages of output.
"""

import shutil

import maturin

WITHOUT_RUST = (
    "encke is compiled from Rust, and there is no cargo on the PATH: install Rust from "
    "https://rustup.rs and try again, or install a compiled wheel with `pip install encke`."
)


def _require_rust():
    if shutil.which("cargo") is None:
        raise SystemExit(WITHOUT_RUST)


def get_requires_for_build_wheel(config_settings=None):
    _require_rust()
    return maturin.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _require_rust()
    return maturin.get_requires_for_build_editable(config_settings)


def get_requires_for_build_sdist(config_settings=None):
    _require_rust()
    return maturin.get_requires_for_build_sdist(config_settings)


prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable
build_wheel = maturin.build_wheel
build_editable = maturin.build_editable
build_sdist = maturin.build_sdist
