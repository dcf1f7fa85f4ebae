"""`lit-effattn configs` and `lit-effattn kinds`: what there is, without Lightning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_effattn.cli import main
from tests.support.commands import REPOSITORY, fails

KINDS = {  # direction, state and cross-attention, from the papers
    "CompressiveAttention": ("causal", "bounded", "none"),
    "InfiniteAttention": ("causal", "bounded", "none"),
    "LSHAttention": ("causal, bidirectional", "grows", "none"),
    "LinearAttention": ("causal, bidirectional", "bounded", "LinearCrossAttention"),
    "PerformerAttention": ("causal, bidirectional", "bounded", "PerformerCrossAttention"),
    "ShawAttention": ("causal, bidirectional", "grows, unless window is given", "none"),
    "SoftmaxAttention": ("causal, bidirectional", "grows, unless window is given", "SoftmaxCrossAttention"),
    "SparseAttention": ("causal, bidirectional", "grows", "none"),
    "TransformerXLAttention": ("causal, bidirectional", "bounded", "none"),
}


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    main(list(args))
    return capsys.readouterr().out


def test_configs_are_listed_with_the_first_sentence_of_their_comment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "lit_effattn.settings.shipped", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    lines = dict(line.split(maxsplit=1) for line in printed(capsys, "configs").splitlines())
    assert sorted(lines) == sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml"))
    digits = "handwritten digits (8×8, 17 grey levels): no download, 3 minutes on 2 cores"
    assert lines["digits_linear"] == f"Linear Transformer on UCI's 1,797 {digits}"
    assert lines["wmt14_en_de_base"].startswith("The base Transformer of Vaswani et al. 2017 on WMT14")
    assert all(len(line) > 20 for line in lines.values())


def test_a_config_is_shown(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "configs", "digits_linear")
    assert text.startswith("# Linear Transformer")
    assert yaml.safe_load(text) == yaml.safe_load((REPOSITORY / "configs" / "digits_linear.yaml").read_text())
    assert "did you mean digits_linear?" in fails(capsys, "configs", "digits_linaer", code=2)


def test_kinds_say_direction_state_and_cross_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "lit_effattn.settings.kinds", raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    lines = printed(capsys, "kinds").splitlines()
    starts = [lines[0].index(title) for title in ("kind", "direction", "state", "cross-attention")]
    columns = [slice(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    rows = [[line[column].strip() for column in columns] for line in lines[1:] if line[:1].isupper()]
    assert {name: tuple(rest) for name, *rest in rows if name in KINDS} == KINDS
    assert lines[lines.index(next(line for line in lines if line.startswith("LinearA"))) + 1].split(", ")[:3] == [
        "    feature_map=EluFeatureMap",
        "chunk_size=64",
        "bias=True",
    ]


def test_the_options_of_a_kind_are_described(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "kinds", "SoftmaxAttention")
    assert text.startswith("SoftmaxAttention: Scaled dot-product attention.")
    assert "window=None  Number of keys a position sees, its own included; None: all." in text
    assert printed(capsys, "kinds", "softmax") == text
    assert "'LinearAtention'; there are CompressiveAttention, " in fails(capsys, "kinds", "LinearAtention", code=2)
    assert "'delta' is ambiguous: give one of DeltaNetAttention, Gated" in fails(capsys, "kinds", "delta", code=2)


@pytest.mark.parametrize(
    ("refusal", "direction", "state"),
    [
        (
            "if d_model < 32: raise ValueError('too small')",
            "depends on its options",
            "depends on its options",
        ),
        ("assert d_model >= 32", "depends on its options", "depends on its options"),
        ("assert causal", "causal", "bounded"),
    ],
)
def test_an_own_kind_that_refuses_a_small_layer(
    refusal: str, direction: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "choosy", raising=False)
    (tmp_path / "choosy.py").write_text(
        "from lit_effattn.attention import LinearAttention\n"
        "class Choosy(LinearAttention):\n"
        "    def __init__(self, d_model, n_heads, causal):\n"
        f"        {refusal}\n"
        "        super().__init__(d_model, n_heads, causal)\n"
    )
    said = printed(capsys, "kinds", "choosy.Choosy")
    assert f"  direction: {direction}; state: {state}; cross-attention: none\n" in f"{said}\n"


@pytest.mark.parametrize("args", [["configs"], ["configs", "digits_linear", "stdlib_xl"], ["--help"]])
def test_output_that_nobody_reads_ends_quietly(args: list[str]):
    """As in `lit-effattn configs | head -1`. Python's output is buffered."""
    started = [sys.executable, "-m", "lit_effattn.cli", *args]
    how = {"env": {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}, "cwd": REPOSITORY}
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141
