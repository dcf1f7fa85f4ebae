"""A setting counts as given in whatever form the user gives it, and not because its name occurs somewhere."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonargparse._typehints
import pytest
import yaml

from lit_effattn.analysis.sweep import sweep
from lit_effattn.cli import main
from lit_effattn.cli.parser import Parser
from tests.cli.test_command import TINY
from tests.support.commands import fails, last, spec
from tests.support.small_runs import checkpoint

SPARSE = spec("SparseAttention", stride=4)
TRANSFORMER = {**TINY["model"]["init_args"]["backbone"]["init_args"], "attention": SPARSE}
pytestmark = pytest.mark.usefixtures("empty_folder")


def fit(*args: str) -> Path:
    """Train for one step and return the run's folder."""
    before = {*Path().rglob("config.yaml")}
    main(["fit", "--config", "tiny.yaml", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", *args])
    (new,) = {*Path().rglob("config.yaml")} - before
    return new.parent


def stride(run: Path) -> int:
    attention = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["backbone"]["init_args"]
    (kind,) = attention["attention"] if isinstance(attention["attention"], list) else [attention["attention"]]
    result: int = kind["init_args"]["stride"]
    return result


# ------------------------------------------------------------------------------------------------ options of attention


@pytest.mark.parametrize(
    "flags",
    [["--model", json.dumps(spec("PixelModel", backbone={"init_args": TRANSFORMER}))], ["-c", "nested.yaml"]],
    ids=["model", "a file in a file"],
)
def test_a_stride_is_kept(flags: list[str]):
    Path("sparse.yaml").write_text(yaml.safe_dump(SPARSE))
    Path("nested.yaml").write_text("model: {init_args: {backbone: {init_args: {attention: sparse.yaml}}}}")
    assert stride(fit(*flags)) == 4


def test_a_pattern_whose_name_contains_stride_states_none():
    assert stride(fit("--model.backbone.attention=SparseAttention", "--model.backbone.attention.pattern=strided")) == 8


# ------------------------------------------------------------------------------------------------ the folder of a run


def test_a_folder_of_runs_in_a_mapping_is_the_folder_of_runs():
    run = fit("--trainer", "{default_root_dir: mine, limit_val_batches: 0}", "--name", "a")
    assert run.parent == Path("mine/a")
    main(["test", "--ckpt_path", "last", "--trainer", "{default_root_dir: mine}", "--name", "a"])


def test_a_class_that_is_swapped_in_a_mapping_names_the_run():
    flags = ["--model", "{class_path: PixelModel, init_args: {backbone: {init_args: {attention: [ShawAttention]}}}}"]
    Path("mine.yaml").write_text(yaml.safe_dump({**TINY, "trainer": {"default_root_dir": "runs/mine"}}))
    assert fit("--config", "mine.yaml", *flags).parent == Path("runs/mine+ShawAttention")


def test_a_name_may_be_a_number():
    Path("mine.yaml").write_text("name: '2024'")
    assert fit("--config", "mine.yaml").parent == Path("runs/2024")


# ------------------------------------------------------------------------------------------------ settings of the data


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", '{"class_path": "PixelModel", "init_args": {"n_levels": 17}}'],
        ["--model.init_args", "{n_levels: 17}"],
        ["--model.n_levels", "17"],
    ],
)
def test_what_the_data_fix_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert "--model.n_levels can't be given" in fails(capsys, "fit", "--config", "tiny.yaml", *flags)


def test_recordings_in_a_mapping_need_no_corpus(capsys: pytest.CaptureFixture[str]):
    """The checkpoint then says what the corpus would; here, that there is no such file."""
    data = '{"class_path": "SpeechData", "init_args": {"audio": "missing.wav"}}'
    by_flag = fails(capsys, "predict", "--ckpt_path", str(checkpoint("speech")), "--data.audio", "missing.wav")
    assert fails(capsys, "predict", "--ckpt_path", str(checkpoint("speech")), "--data", data) == by_flag


# ------------------------------------------------------------------------------------------------ checkpoints, trust


def test_names_that_are_appended_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine_of_arguments.py").write_text(
        "from lit_effattn.attention import LinearAttention\nclass MyAttention(LinearAttention):\n    'Mine.'\n"
    )
    fit("--model.backbone.attention", "mine_of_arguments.MyAttention")
    main(["test", "--ckpt_path", str(last("runs")), "--trust+=mine_of_arguments"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.optimizer", "{class_path: torch.optim.Adam, init_args: {lr: 1}}"], "--model.optimizer.lr is set by"),
        (["--model.init_args.optimizer.init_args.lr=1"], "--model.optimizer.lr is set by"),
        (["--trainer", "{default_root_dir: mine}"], "--trainer.default_root_dir is set by"),
    ],
)
def test_what_a_sweep_sets_is_refused_in_a_mapping(flags: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        sweep(["--config", "tiny.yaml", "--kinds", "linear", "--output", "nowhere", *flags])
    assert not Path("nowhere").exists()


# ----------------------------------------------------------------------------------------------------------- defaults


def test_nested_settings_get_their_defaults_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Each level of nested classes that adds them triples the work. The settings are those of jsonargparse alone."""
    parsed: Counter[str] = Counter()
    parse = jsonargparse._typehints.adapt_class_type

    def counted(value: Any, *args: Any, **options: Any) -> Any:
        parsed[value["class_path"].rsplit(".")[-1]] += 1
        return parse(value, *args, **options)

    monkeypatch.setattr(jsonargparse._typehints, "adapt_class_type", counted)
    printed = []
    for ours in (True, False):
        if not ours:
            monkeypatch.delattr(Parser, "_parse_common")
        feature_map = "--model.backbone.encoder.attention.feature_map=EluFeatureMap"
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["fit", "--config", "g2p_linear", feature_map, "--trainer.max_steps", "3", "--print_config"])
        printed.append((capsys.readouterr().out, parsed["EluFeatureMap"]))
        parsed.clear()
    (once, few), (definition, many) = printed
    assert once == definition
    assert "EluFeatureMap" in definition
    assert 0 < 2 * few < many
