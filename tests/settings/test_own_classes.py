"""A kind of the user's own, in a module in the current folder: every command, and what can be wrong with it."""

import csv
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.analysis.sweep import RECORD, Sweep
from lit_effattn.checkpoints.trust import may_name_modules
from lit_effattn.cli import main
from lit_effattn.tasks import LanguageModel
from tests.analysis.test_sweep import CONFIG, Children
from tests.support.commands import REPOSITORY, fails

EXAMPLE = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs/own-kind.md").read_text(), re.S)
KIND = "my_module.MeanAttention"
OPTION = "model.backbone.attention"
ERRORS = {
    "misspelt": ("my_module.MeanAtention", "my_module has no 'MeanAtention'; did you mean my_module.MeanAttention?"),
    "no_module": ("no_such_module.Mine", "there is no module 'no_such_module'"),
    "syntax": ("bad_syntax.Mine", "bad_syntax.py, line 2: SyntaxError: "),
    "import": ("bad_import.Mine", "bad_import.py, line 2: ModuleNotFoundError: No module named 'numppy'"),
    "raises": ("raises.Mine", "raises.py, line 3: ZeroDivisionError: division by zero"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the example of the documentation as a module, a run of it, and modules that can't be imported."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_module.py").write_text(EXAMPLE[1])
    (folder / "other.py").write_text("class Mine: pass\n")
    (folder / "bad_syntax.py").write_text("import torch\nclass Mine(torch.nn.Module)\n    pass\n")
    (folder / "bad_import.py").write_text("import torch\nimport numppy\n")
    (folder / "raises.py").write_text("import torch\n\n1 / 0\n")
    (folder / "unfinished.py").write_text("from lit_effattn.attention import Attention\nclass Mine(Attention): pass\n")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _forget_modules_of_others(patch)
        main(["fit", "--config", "tiny.yaml", f"--{OPTION}", KIND])
    yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def _forget_modules_of_others(patch: pytest.MonkeyPatch) -> None:
    """Let `my_module` be found anew: other tests have one of their own, in folders that stay on the path."""
    patch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "my_module.py").is_file()])
    sys.modules.pop("my_module", None)


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command finds the module by itself, as in a process of its own."""
    monkeypatch.chdir(folder)
    _forget_modules_of_others(monkeypatch)


def test_every_command_takes_a_kind_of_ones_own_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (checkpoint,) = Path().rglob("best.ckpt")
    run = str(checkpoint.parent.parent)
    for args in (
        ["test", "--ckpt_path", "best"],
        ["predict", "--ckpt_path", "best"],
        ["fit", "--ckpt_path", "last", "--trainer.fast_dev_run", "1"],
        ["fit", "--config", "tiny.yaml", "--transfer_from", str(checkpoint), "--trainer.fast_dev_run", "1"],
        ["export", "--ckpt_path", "best", "--output", str(tmp_path / "x.pt2"), "--format", "torch"],
        ["compare", run],
        ["report", run, "--samples", "1", "--output", str(tmp_path / "report.html")],
    ):
        sys.modules.pop("my_module", None)
        main(args)
        assert "my_module" not in capsys.readouterr().err
    assert type(LanguageModel.load_from_checkpoint(checkpoint).backbone.blocks[0].attention).__name__ == KIND[10:]
    assert "parameters" in (page := (tmp_path / "report.html").read_text())
    assert "can't be read" not in page
    sys.modules.pop("my_module", None)
    assert f"{checkpoint} can't be converted, as its model is of no family" in fails(
        capsys, "convert", str(checkpoint), str(tmp_path / "out")
    )


def test_of_somebody_elses_run_the_model_alone_is_used_with_trust(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (checkpoint,) = Path().rglob("best.ckpt")
    config = checkpoint.parent.parent / "config.yaml"
    for args in (
        ["export", "--ckpt_path", "best", "--output", str(tmp_path / "x.pt2"), "--format", "torch"],
        ["test", "--ckpt_path", "best", "--config", "data.yaml"],
    ):
        Path("data.yaml").write_text(yaml.safe_dump({"data": CONFIG["data"]}))
        sys.modules.pop("my_module", None)
        assert f"--trust {KIND}" in fails(capsys, *args)
        assert "my_module" not in sys.modules
        main([*args, "--trust", KIND])
    assert "only the model of the checkpoint is used: read that file" in caplog.text
    for trust in (KIND, sys.modules["my_module"].MeanAttention, "my_module"):
        model = LanguageModel.load_from_checkpoint(checkpoint, trust=(trust,))
        assert type(model.backbone.blocks[0].attention).__name__ == KIND[10:]
    for command in ("test", "fit"):
        output = fails(capsys, command, "--ckpt_path", "best", "--trust", KIND)
        assert f"this account did not write {config}" in output
        sys.modules.pop("my_module", None)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
        caplog.clear()
        main([command, "--ckpt_path", "best", "--config", str(config), "--trainer.fast_dev_run", "1"])
        assert "this account did not write" not in caplog.text  # it is accepted


@pytest.mark.parametrize("tool", ["compare", "report", "export", "convert", "data", "sweep"])
def test_what_is_trusted_must_be_there(tool: str, capsys: pytest.CaptureFixture[str]):
    args = {
        "export": [],
        "convert": ["tiny.yaml", "out"],
        "data": ["--config", "tiny.yaml"],
        "sweep": ["--config", "tiny.yaml", "--kinds", "linear"],
    }.get(tool, ["."])
    assert "--trust no_such.Mine: there is no module 'no_such'" in fails(capsys, tool, *args, "--trust", "no_such.Mine")


def test_a_sweep_trusts_the_kinds_that_it_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("lit_effattn.analysis.sweep.Sweep", partial(Sweep, start=Children()))
    args = ["sweep", "--config", "tiny.yaml", "--kinds", f"{KIND},linear", "--lr", "0.01", "--seeds", "1"]
    main([*args, "--output", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["kind"] for row in rows] == [KIND, "LinearAttention"]
    assert all(float(row["val/perplexity"]) > 1 and int(row["parameters"]) for row in rows)
    assert "--trust" not in (tmp_path / RECORD).read_text()
    main([*args, "--output", str(tmp_path), "--trust", "my_module"])  # the same sweep: nothing is trained again
    assert len(list(tmp_path.rglob("best.ckpt"))) == 2


@pytest.mark.parametrize("name", ERRORS)
def test_a_kind_that_cant_be_imported(name: str, capsys: pytest.CaptureFixture[str]):
    kind, reason = ERRORS[name]
    for value in (kind, f"[{kind}, LinearAttention]", f"{{class_path: {kind}}}"):
        output = fails(capsys, "fit", "--config", "tiny.yaml", f"--{OPTION}", value, code=2)
        assert f"{OPTION}: {kind}: {reason}" in output
    assert f"{kind}: {reason}" in fails(capsys, "kinds", kind, code=2)
    sweep = ["sweep", "--config", "tiny.yaml", "--kinds", f"linear,{kind}", "--output", "sweep"]
    assert f"error: {kind}: {reason}" in fails(capsys, *sweep)
    assert not Path("sweep").exists()
    assert f"--trust {kind}: {reason}" in fails(capsys, "test", "--ckpt_path", "best", "--trust", kind)


@pytest.mark.parametrize("option", ["model", "model.backbone", "model.optimizer", "data", "trainer.callbacks+"])
def test_any_class_that_cant_be_imported(option: str, capsys: pytest.CaptureFixture[str]):
    output = fails(capsys, "fit", "--config", "tiny.yaml", f"--{option}=bad_syntax.Mine", code=2)
    assert f"{option.rstrip('+')}: bad_syntax.Mine: bad_syntax.py, line 2: SyntaxError: " in output


def test_what_is_no_kind_of_attention(capsys: pytest.CaptureFixture[str]):
    assert "other.Mine is not an attention kind: derive" in fails(capsys, "kinds", "other.Mine", code=2)
    assert f"{OPTION}: other.Mine is not an Attention; there are" in fails(
        capsys, "fit", "--config", "tiny.yaml", f"--{OPTION}", "other.Mine", code=2
    )
    assert "unfinished.Mine has no method empty_state, which" in fails(
        capsys, "sweep", "--config", "tiny.yaml", "--kinds", "unfinished.Mine"
    )


def test_kinds_describes_a_kind_of_ones_own(capsys: pytest.CaptureFixture[str]):
    main(["kinds", KIND])
    output = capsys.readouterr().out
    assert output.startswith("MeanAttention: y_i = mean of v_j, j ≤ i.\n  direction: causal")
    assert "\n  head_dim=None  Dimensions D of a head's queries, keys and values;" in output


def test_options_without_a_default_are_named(capsys: pytest.CaptureFixture[str]):
    text = "from lit_effattn.attention import LinearAttention\nclass Mine(LinearAttention):\n"
    Path("required.py").write_text(f"{text}    def __init__(self, d_model, n_heads, causal, *, depth, **more): ...\n")
    main(["kinds", "required.Mine"])
    output = capsys.readouterr().out
    assert "depth=(required)" in output
    assert "more" not in output


def test_a_module_of_the_current_folder_is_imported_only_if_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Libraries try modules that may be missing, such as opt_einsum: a file of that name does not run in its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("planted_one.py").touch()
    Path("planted_two.py").touch()
    may_name_modules("--model.backbone.attention planted_one.Mine")
    assert find_spec("planted_two") is None
    assert find_spec("planted_one") is not None
    assert sys.path[-1] == str(tmp_path)
