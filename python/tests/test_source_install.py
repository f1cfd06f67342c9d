"""Installing from source without a Rust toolchain says in one sentence what to do."""

import os
import subprocess
import sys
from pathlib import Path

BACKEND = Path(__file__).parents[1] / "build_backend"
HOOKS = """
def hook(*_): return []
get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = hook
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = hook
build_wheel = build_editable = build_sdist = hook
"""


def ask(folder, hook, path):
    """What pip would see of a hook of the backend, with this PATH."""
    (folder / "maturin.py").write_text(HOOKS)
    code = f"import encke_build; print(encke_build.{hook}())"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{folder}:{BACKEND}"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def test_without_cargo(tmp_path):
    for kind in ("wheel", "editable", "sdist"):
        asked = ask(tmp_path, f"get_requires_for_build_{kind}", str(tmp_path))
        assert asked.returncode == 1
        assert asked.stderr.count("\n") == 1, asked.stderr
        assert "install Rust from https://rustup.rs" in asked.stderr


def test_with_cargo_the_hooks_are_those_of_maturin(tmp_path):
    cargo = tmp_path / "cargo"
    cargo.touch()
    cargo.chmod(0o755)
    asked = ask(tmp_path, "get_requires_for_build_wheel", str(tmp_path))
    assert asked.stdout == "[]\n", asked.stderr
