"""`lit-effattn check` and `python -m lit_effattn.laws`: modules by their names."""

import runpy
import sys
from pathlib import Path

import pytest

from lit_effattn.cli import main
from tests.laws.cases import ATTENTIONS

KINDS = {case.make.func.__name__ for case in ATTENTIONS}

# A newcomer's kind: its state counts padding as positions that it has seen.
MINE = """
import torch
from lit_effattn.attention import Attention
from typing import NamedTuple

class MeanState(NamedTuple):
    total: torch.Tensor
    length: torch.Tensor

class MyAttention(Attention):
    def empty_state(self, batch_size, max_len, device, dtype):
        shape = batch_size, self.n_heads, self.head_dim
        return MeanState(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(batch_size, dtype=torch.long))

    def attend(self, q, k, v, state, lengths):
        b, _, n, _ = v.shape
        state = state or self.initial_state(b, dtype=v.dtype)
        total = state.total[:, :, None] + v.cumsum(2)
        count = state.length[:, None] + torch.arange(1, n + 1)
        return total / count[:, None, :, None], MeanState(total[:, :, -1], state.length + n)

class Needy(MyAttention):
    def __init__(self, d_model, n_heads, causal=True, *, stride):
        super().__init__(d_model, n_heads, causal)

def broken():
    raise OSError("no such file")

number = 3
built = MyAttention(8, 2, True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checked_module.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("checked_module", None)
    return tmp_path


def test_a_state_that_absorbs_padding_is_told(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "checked_module.MyAttention", "--laws", "steps,segments,padding,ragged"])
    assert stopped.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("MyAttention: 4 laws checked in ")
    assert captured.err.endswith("2 broken: padding, ragged\n")
    assert "smallest case: batch 1, length 3, split 2 + 1, valid positions [1]" in captured.out


@pytest.mark.parametrize(
    ("kinds", "laws"),
    [
        (["LSHAttention", "KimiDeltaAttention"], ["--laws", "no-future,padding,half-precision"]),
        pytest.param(sorted(KINDS), [], marks=pytest.mark.exhaustive),
    ],
)
def test_no_kind_of_the_library_is_called_broken(kinds: list[str], laws: list[str]):
    main(["check", *kinds, *laws])


def test_kinds_options_and_modules_of_torch_are_named(capsys: pytest.CaptureFixture[str]):
    main(["check", "SparseAttention", "--set", "stride=3", "--set", "d_model=16", "--laws", "alive, steps"])
    main(["check", "LinearAttention", "torch.nn.GRU", "--laws", "alive", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if "laws checked" in line] == [
        *("SparseAttention", "LinearAttention", "GRU")
    ]
    assert "float32" in out


INVALID = [
    (["nowhere.Mine"], "nowhere.Mine: No module named 'nowhere'"),
    (["checked_module.Other"], "checked_module.Other: checked_module has no 'Other'"),
    (["LinearAttentoin"], "has no 'LinearAttentoin'; did you mean LinearAttention?"),
    (["checked_module:number"], "checked_module:number is a int; name a class"),
    (["checked_module.broken"], "can't be built by broken(): OSError: no such file; give its options by --set"),
    (["checked_module.Needy"], "can't be built by Needy(8, 2): TypeError"),
    (["LinearAttention", "--laws", "order"], "laws='order' is not a law; there are alive"),
    (["torch.nn.Linear", "--set", "in_features=3", "--set", "out_features=3"], "there is no built-in adapter"),
    (["LinearAttention", "--set", "stride"], "'stride' is not OPTION=VALUE"),
    (["LinearAttention", "--laws", ""], "laws='' is not a law"),
    (["LinearAttention", "--device", "nowhere"], "device='nowhere' can't be used"),
    (["LinearAttention", "--device", "meta"], "device='meta' can't be used"),
    (["LinearAttention", "--unit", "0"], "LinearAttention: unit=0 must be at least 1"),
    (["torch.nn.GRU", "--set", "batch_first=False"], "batch_first=False; make the module with batch_first=True"),
    (["checked_module:built", "--set", "stride=3"], "built takes no options; leave out --set stride"),
]
"""Arguments, and what is said of them."""


def test_invalid_arguments_are_told_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in INVALID:
        with pytest.raises(SystemExit) as stopped:
            main(["check", *arguments])
        assert (stopped.value.code, arguments) == (2, arguments)
        assert message in capsys.readouterr().err


def test_the_package_is_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["laws", "checked_module:MyAttention", "--laws", "ragged"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("lit_effattn.laws", run_name="__main__")
    assert stopped.value.code == 1
    assert "1 broken: ragged" in capsys.readouterr().err
