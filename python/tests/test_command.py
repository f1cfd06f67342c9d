"""``python -m encke`` runs the command ``encke``."""

import subprocess
import sys

import encke


def command(*arguments):
    ran = [sys.executable, "-m", "encke", *arguments]
    return subprocess.run(ran, capture_output=True, text=True, timeout=60)


def test_plan_equals_explain():
    ended = command(*"plan --tokens 4k --heads 8 --dim 64 --ranks 4 --causal".split())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == encke.explain(tokens=4096, heads=8, dim=64, ranks=4, causal=True)


def test_errors_are_one_line_with_an_exit_code():
    ended = command("plan", "--tokens", "many")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("encke: ") and ended.stderr.count("\n") == 1
    assert "see encke plan --help" in ended.stderr


def test_help_and_version():
    assert encke.__version__ in command("--version").stdout
    assert "encke attend" in command("--help").stdout
