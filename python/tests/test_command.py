"""``python -m encke`` is the command."""

import subprocess
import sys

import encke


def command(*words):
    ran = [sys.executable, "-m", "encke", *words]
    return subprocess.run(ran, capture_output=True, text=True, timeout=60)


def test_it_plans_as_explain_does():
    ended = command(*"plan --tokens 4k --heads 8 --dim 64 --ranks 4 --causal".split())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == encke.explain(tokens=4096, heads=8, dim=64, ranks=4, causal=True)


def test_it_says_no_in_one_line_and_with_its_exit_code():
    ended = command("plan", "--tokens", "many")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("encke: ") and ended.stderr.count("\n") == 1
    assert "see encke plan --help" in ended.stderr


def test_help_and_version():
    assert encke.__version__ in command("--version").stdout
    assert "encke attend" in command("--help").stdout
