"""The package: what an import brings, its command, its types, modules that refuse at once."""

import importlib.util
import inspect
import subprocess
import sys
import textwrap

import pytest

import encke
from encke._typing import AttentionOptions, RingOptions


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
    pytest.importorskip("torch")
    given = set(inspect.signature(encke.distributed.ring_attention).parameters)
    tensors = {"q_local", "k_local", "v_local", "return_lse"}
    assert set(RingOptions.__annotations__) == given - tensors


def test_type_checkers_know_what_is_returned(tmp_path):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed")
    code = """
        import numpy
        import encke
        q = numpy.zeros((1, 4, 2, 8))
        reveal_type(encke.attention(q, q, q, causal=True))
        reveal_type(encke.attention(q, q, q, return_lse=True))
        encke.attention(q, q, q, casual=True)
        import torch
        x = torch.zeros(1, 4, 2, 8)
        reveal_type(encke.scaled_dot_product_attention(x, x, x))
        reveal_type(encke.distributed.ring_attention(x, x, x, return_lse=True))
        reveal_type(encke.attention_rows(x, x, x, [0]))
        encke.distributed.ring_attention(x, x, x, casual=True)
    """
    path = tmp_path / "call.py"
    path.write_text(textwrap.dedent(code))
    text, _, _ = mypy.run([str(path), "--follow-imports=silent", f"--cache-dir={tmp_path}"])
    assert 'call.py:5: note: Revealed type is "numpy.ndarray' in text, text
    assert 'call.py:6: note: Revealed type is "tuple[numpy.ndarray' in text, text
    assert 'call.py:7: error: Unexpected keyword argument "casual"' in text, text
    if importlib.util.find_spec("torch") is not None:
        assert 'call.py:10: note: Revealed type is "torch._tensor.Tensor"' in text, text
        assert 'call.py:11: note: Revealed type is "tuple[torch._tensor.Tensor' in text, text
        assert 'call.py:12: note: Revealed type is "torch._tensor.Tensor"' in text, text
        assert 'call.py:13: error: Unexpected keyword argument "casual"' in text, text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(segment_lengths=[4, 8], dilation_rates=[1]), "2 segment lengths but 1"),
        (dict(segment_lengths=[1, 2], dilation_rates=[64, 128]), "Are the two swapped"),
        (dict(segment_lengths=[4], dilation_rates=[1], mode="mixed"), 'mode="mixed" is unknown'),
        (dict(segment_lengths=[4.5], dilation_rates=[1]), r"segment_lengths\[0\] is 4.5"),
        (dict(segment_lengths=[4], dilation_rates=[-1]), r"dilation_rates\[0\] is -1"),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(documents=[4], cu_seqlens=[0, 4]), "two forms of one thing"),
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


def test_a_module_without_heads_is_refused():
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="num_heads is 0"):
        encke.nn.MultiheadDilatedAttention(32, 0)


def test_modules_of_modules_are_lazy_too():
    pytest.importorskip("transformers")
    code = "import encke; encke.compat.torchscale; encke.integrations.transformers.register()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_take_what_a_call_takes():
    torch = pytest.importorskip("torch")
    layer = encke.nn.DilatedAttention(
        window=(3, 0), sinks=torch.zeros(2), documents=[3, 5], attention_dropout=0.5
    )
    q = torch.zeros(1, 8, 2, 4)
    assert layer(q, q, q, is_causal=True).shape == q.shape


def test_errors_come_out_of_other_processes_as_they_were():
    """A pool of processes pickles what its workers raise."""
    import pickle

    errors = [getattr(encke, name) for name in dir(encke)]
    errors = [x for x in errors if isinstance(x, type) and issubclass(x, Exception)]
    assert encke.MaskError in errors and len(errors) > 1
    for kind in errors:
        error = kind("words", (1, 2)) if kind is encke.MaskError else kind("words")
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (kind, "words", vars(error))


def test_help_is_short_first():
    text = inspect.getdoc(encke.attention)
    assert text.index("In short") < 600 < text.index("segment_lengths, dilation_rates\n")
