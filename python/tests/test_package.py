"""The package: what an import brings, its command, its types, modules that refuse at once."""

import inspect
import subprocess
import sys
import textwrap

import pytest

import encke
from encke._typing import AttentionOptions


def test_modules_are_there_without_an_import_of_their_own():
    code = "import encke; print(encke.nn.LongNetEncoder.__name__, encke.distributed.shard.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "LongNetEncoder shard\n", ran.stderr
    assert {"nn", "distributed", "transformers"} <= set(dir(encke))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        encke.nothing


def test_importing_encke_does_not_import_torch():
    code = "import encke, sys; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr


def test_the_types_name_every_option():
    options = set(inspect.signature(encke.attention).parameters) - {"q", "k", "v", "return_lse"}
    assert set(AttentionOptions.__annotations__) == options


def test_type_checkers_know_what_is_returned(tmp_path):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed")
    code = """
        import numpy
        import encke
        q = numpy.zeros((1, 4, 2, 8))
        reveal_type(encke.attention(q, q, q, causal=True))
        reveal_type(encke.attention(q, q, q, return_lse=True))
        encke.attention(q, q, q, casual=True)
    """
    path = tmp_path / "call.py"
    path.write_text(textwrap.dedent(code))
    text, _, _ = mypy.run([str(path), "--follow-imports=silent", f"--cache-dir={tmp_path}"])
    assert 'call.py:5: note: Revealed type is "numpy.ndarray' in text, text
    assert 'call.py:6: note: Revealed type is "tuple[numpy.ndarray' in text, text
    assert 'call.py:7: error: Unexpected keyword argument "casual"' in text, text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(segment_lengths=[4, 8], dilation_rates=[1]), "2 segment lengths but 1"),
        (dict(segment_lengths=[1, 2], dilation_rates=[64, 128]), "Are the two swapped"),
        (dict(segment_lengths=[4], dilation_rates=[1], mode="mixed"), 'mode="mixed" is unknown'),
        (dict(window=(-1, 0)), "a side must be 0 or more"),
        (dict(prefix=4), "only with a window"),
        (dict(cuasal=True), "unknown option 'cuasal'"),
    ],
    ids=str,
)
def test_modules_refuse_wrong_options_when_they_are_made(options, words):
    pytest.importorskip("torch")
    for module in (
        encke.nn.DilatedAttention,
        lambda **given: encke.nn.MultiheadDilatedAttention(32, 4, **given),
        encke.distributed.RingDilatedAttention,
    ):
        with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
            module(**options)


def test_modules_take_what_a_call_takes():
    torch = pytest.importorskip("torch")
    layer = encke.nn.DilatedAttention(
        window=(3, 0), sinks=torch.zeros(2), documents=[3, 5], attention_dropout=0.5
    )
    q = torch.zeros(1, 8, 2, 4)
    assert layer(q, q, q, is_causal=True).shape == q.shape


def test_help_is_short_first():
    text = inspect.getdoc(encke.attention)
    assert text.index("In short") < 600 < text.index("segment_lengths, dilation_rates\n")
