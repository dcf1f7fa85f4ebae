"""The `lit-effattn` command, as a user runs it: in this process where one suffices, in others where a run is killed."""

import errno
import os
import re
import resource
import signal
import subprocess
import tempfile
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.accelerators import cuda
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lit_effattn import PixelModel
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.checkpoints.run_lock import RunLock
from lit_effattn.checkpoints.runs import LAST
from lit_effattn.cli import _message, main
from lit_effattn.cli.command import CLI
from lit_effattn.cli.output import quieten
from lit_effattn.cli.parser import Parser, integers_first
from lit_effattn.datamodules import PixelSequences
from lit_effattn.generation import compiled
from lit_effattn.settings.arguments import Arguments
from tests.support.cases import of_data_sets
from tests.support.commands import (
    REPOSITORY,
    TWO,
    assert_same_end,
    command,
    ends,
    fails,
    last,
    launched,
    same,
    spec,
    weights,
)

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
TINY = {
    "seed_everything": 3,
    "model": spec(
        "PixelModel",
        backbone=spec("Transformer", d_model=16, n_heads=2, n_layers=2, attention="LinearAttention", dropout=0.2),
        optimizer=spec("torch.optim.RAdam", lr=0.001),
        lr_scheduler=spec("WarmupCosine", total_steps=30, warmup_steps=3),
    ),
    "data": spec("PixelSequences", dataset="digits", batch_size=128),
    "trainer": {"max_epochs": 1, "limit_train_batches": 3, "enable_progress_bar": False, "logger": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of tiny.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        patch.setenv("XDG_CACHE_HOME", "cache")
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
        return fit().resolve()


def fit(*args: str) -> Path:
    """Train and return the run's folder."""
    before = set(runs())
    main(["fit", "--config", "tiny.yaml", *args])
    (new,) = set(runs()) - before
    return new


def runs() -> list[Path]:
    return sorted(path.parent for path in Path("runs").rglob("checkpoints"))


# ------------------------------------------------------------------------------------------------ train, test, draw


def test_a_run_keeps_everything_in_one_folder():
    run = fit("--trainer.logger", "true", "--trainer.callbacks+=SampleGrid", "--trainer.callbacks.n_samples", "2")
    written = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt", "samples/epoch_0001.png"} < written
    assert "csv/version_0/metrics.csv" in written
    assert any(name.startswith("tensorboard/events") for name in written)
    assert {path.name for path in Path().iterdir()} - {"cache"} == {"tiny.yaml", "runs"}


def test_an_interval_counts_across_epochs_and_a_schedule_takes_the_steps_of_the_run():
    """3 batches an epoch: one validation, after the fourth."""
    schedule = ["--model.lr_scheduler.total_steps", "null", "--model.lr_scheduler.warmup_steps", "0.5"]
    run = fit("--trainer.val_check_interval", "4", "--trainer.max_epochs", "2", *schedule)
    assert torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["global_step"] == 4
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["total_steps"] == saved["global_step"] == 6


def test_training_that_ends_before_its_first_validation_is_announced(caplog: pytest.LogCaptureFixture):
    run = fit("--trainer.val_check_interval", "3", "--trainer.max_steps", "1", "--trainer.accumulate_grad_batches", "2")
    expected = "no validation and no best.ckpt: --trainer.val_check_interval 3 is more than the 2 training batches"
    assert expected in caplog.text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    run = fit("--trainer.check_val_every_n_epoch", "2", "--trainer.max_epochs", "1")
    assert "best.ckpt: --trainer.check_val_every_n_epoch 2 is more than --trainer.max_epochs 1" in caplog.text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]


def test_testing_reports_what_the_checkpoint_scores(run: Path, capsys: pytest.CaptureFixture[str]):
    main(["test", "--ckpt_path", "best"])
    output = re.search(r"^test bits/dim: (\d+\.\d+)$", capsys.readouterr().out, re.M)
    model = PixelModel.load_from_checkpoint(run / "checkpoints" / "best.ckpt").eval()
    data = PixelSequences("digits")
    data.setup("test")
    with torch.no_grad():
        # (180, 64) nats, from the head's whole table of log-probabilities and not from its loss
        levels = data.splits["test"][list(range(180))].long()
        start = torch.full((180, 1), 17)
        hidden, _ = model.backbone(model.embedding(torch.cat([start, levels[:, :-1]], 1)))
        nats = -model.head.log_probs(hidden).gather(-1, levels[..., None])
    assert float(output[1]) == pytest.approx(nats.mean().item() / np.log(2), abs=1e-4)


def test_predictions_average_to_the_test_result(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    main(["test", "--ckpt_path", "last"])
    output = re.search(r"test bits/dim: (\S+)", capsys.readouterr().out)
    main(["predict", "--ckpt_path", "last"])
    for remark in ("GPU available", "TPU available", "Restoring states", "Loaded model weights", "was configured so"):
        assert remark not in caplog.text
    assert caplog.text.count("last.ckpt") == 2  # once a command
    path = run / "predictions/predictions.csv"
    table = np.genfromtxt(path, delimiter=",", names=True)
    assert len(table) == 180
    assert table["bits_per_dim"].mean() == pytest.approx(float(output[1]), abs=1e-4)


def test_on_a_gpu_a_flag_and_a_variable_are_named_for_faster_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """In place of Lightning's advice to call a function of PyTorch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(cuda, "_is_ampere_or_later", lambda device: True)
    quieten()
    cuda._check_cuda_matmul_precision.__wrapped__(torch.device("cuda", 0))
    (message,) = caplog.messages
    assert "--trainer.precision bf16-mixed" in message
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in message


def test_items_that_lightning_scores_twice_are_announced():
    """Several processes repeat items of a user's own loader. Those of this package are sharded without."""
    quieten()
    warning = "Using `DistributedSampler` with the dataloaders. During `trainer.test()`, it is recommended to use …"
    assert not any(message and message.match(warning) for _, message, *_ in warnings.filters)


def test_generating_writes_a_picture_and_the_levels(run: Path, monkeypatch: pytest.MonkeyPatch):
    """Machine code is that of tests/generation/test_compiled.py."""
    asked = []

    def interpreted(step: compiled.Step, tokens: Tensor, state: list[Tensor]) -> compiled.Program:
        asked.append(True)
        return compiled.Program(torch.no_grad()(step), [t.shape for t in state])

    monkeypatch.setattr(compiled, "program", interpreted)
    monkeypatch.setattr(compiled, "check_inductor", lambda *_: None)
    main(["generate", "--ckpt_path", "last", "--n", "5", "--seed", "7"])
    assert not asked
    main(["generate", "--ckpt_path", "last", "--n", "5", "--seed", "7", "--compile", "true"])
    assert asked == [True]
    main(["generate", "--ckpt_path", "last", "--n", "5", "--seed", "8", "--output", "there"])
    first, second = (np.load(run / "generated" / name / "samples.npy") for name in ("samples", "samples_1"))
    assert first.shape == (5, 8, 8, 1)
    assert first.min() >= 0
    assert first.max() <= 16
    assert np.array_equal(first, second)
    assert not np.array_equal(first, np.load("there/samples.npy"))
    assert Path("there/samples.png").stat().st_size > 0


def test_completing_keeps_what_is_not_erased(run: Path):
    main(["generate", "--ckpt_path", "last", "--n", "3", "--complete", "0.25"])
    levels = np.load(run / "generated" / "samples" / "samples.npy")
    data = PixelSequences("digits")
    data.setup("test")
    originals = data.splits["test"][[0, 1, 2]].view(3, 8, 8, 1).numpy()
    assert np.array_equal(levels[:, :6], originals[:, :6])
    assert not np.array_equal(levels[:, 6:], originals[:, 6:])
    assert (run / "generated" / "samples" / "completed.png").is_file()


# ------------------------------------------------------------------------------------------------ what is configured


def test_a_list_of_attentions_is_dealt_over_the_layers_and_survives_the_checkpoint(capsys: pytest.CaptureFixture[str]):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["model"]["init_args"]["backbone"]["init_args"]["attention"] = [
        spec("SoftmaxAttention", window=5),
        spec("LinearAttention", chunk_size=7),
    ]
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    run = fit()
    model = PixelModel.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    first, second = (block.attention for block in model.backbone.blocks)
    assert isinstance(first, SoftmaxAttention)
    assert first.window == 5
    assert isinstance(second, LinearAttention)
    assert second.chunk_size == 7
    main(["test", "--ckpt_path", "last"])  # built again from the configuration in the checkpoint
    assert "test bits/dim" in capsys.readouterr().out


OFFLINE = ("copy", "dialogue", "digits", "mqar", "retrieval", "sorting", "state_tracking", "stdlib", "text_")
SPEECH = ("espeak", "librispeech", "russian", "timit", "wsj")  # see test_command_speech.py
PAIRS = ("g2p", "iwslt14", "libreoffice", "retrieval", "wmt14")  # see test_command_pairs.py
DIALOGUES = ("cmudog",)  # see test_command_dialogue.py
OTHERS = SPEECH + PAIRS + DIALOGUES


def built(config: Path, *args: str, device: str = "meta") -> CLI:
    """Make all that a configuration names, and train nothing.

    On torch's meta device, which has shapes without numbers: some of the models are of a GB.
    """
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        patch.setattr(CLI, "_run_subcommand", lambda *_: None)
        return CLI(Arguments(["fit", "--config", str(config), "--trainer.fast_dev_run", "1", *args]))


def ask_for_data(config: Path, *args: str) -> None:
    made = built(config, *args)
    made.model.configure_optimizers()
    made.datamodule.prepare_data()


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize("config", of_data_sets(c for c in CONFIGS if not c.stem.startswith(OTHERS)))
def test_every_configuration_works_as_far_as_it_needs_no_download(config: Path):
    """Offline ones take a step (of one row) of training and validation; others say what belongs where."""
    data = yaml.safe_load(config.read_text())["data"]
    text = data["class_path"] == "TextStream"
    if config.stem.startswith(OFFLINE):
        args = ["fit", "--config", str(config), "--trainer.fast_dev_run", "1", "--trainer.enable_progress_bar", "false"]
        args += ["--data.batch_size", "1", "--data.eval_batch_size", "1"]
        main([*args, "--data.max_bytes", "200000"] if text else args)
    else:
        with pytest.raises(FileNotFoundError) as missing:
            ask_for_data(config, *([] if text else ["--data.download", "false"]))
        own = data["init_args"].get("source") == "files"  # made by scripts.proteins
        expected = "no such folder" if own else "source='stdlib'" if text else "--config digits_linear"
        assert expected in str(missing.value)
        assert str(Path("data").resolve()) in str(missing.value)
    assert not Path("runs").exists()


FAMILIES = ("digits_linear",)


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=c.stem, marks=[] if c.stem in FAMILIES else pytest.mark.exhaustive)
        for c in CONFIGS
        if c.stem.startswith(OFFLINE)
    ],
)
def test_a_configuration_serves_every_command(config: Path):
    """As users of a LightningCLI write it: with the file that the model was trained with."""
    less = ["--data.batch_size", "1", "--data.eval_batch_size", "1", "--trainer.enable_progress_bar", "false"]
    settings = yaml.safe_load(config.read_text())
    backbone = settings["model"]["init_args"]["backbone"]
    if backbone["class_path"] == "Transformer":
        kinds = backbone["init_args"].get("attention")  # a layer of each
        less += ["--model.backbone.n_layers", str(len(kinds) if isinstance(kinds, list) else 1)]
    if settings["data"]["class_path"] == "TextStream":
        less += ["--data.max_bytes", "200000"]
    made = built(config, *less, device="cpu")
    trainer = made.trainer
    trainer.strategy.connect(made.model)
    trainer.save_checkpoint("model.ckpt")
    for name in ("validate", "test", "predict"):
        given = [name, "--config", str(config), "--ckpt_path", "model.ckpt", *less]
        main([*given, f"--trainer.limit_{name.removesuffix('idate')}_batches", "1"])


def test_what_training_alone_knows_is_no_flag_of_another_command(run: Path, capsys: pytest.CaptureFixture[str]):
    config = {**TINY, "checkpoint": {"every_n_train_steps": 7}, "init_weights": "nowhere.ckpt", "modle": 1}
    Path("more.yaml").write_text(yaml.safe_dump(config))
    assert "modle" in fails(capsys, "test", "--config", "more.yaml", "--ckpt_path", "last", code=2)
    del config["modle"]
    Path("more.yaml").write_text(yaml.safe_dump(config))
    main(["test", "--config", "more.yaml", "--ckpt_path", "last"])
    assert "init_weights" in fails(capsys, "test", "--ckpt_path", "last", "--init_weights", "last", code=2)
    assert "every_n_train_steps" in fails(
        capsys, "test", "--ckpt_path", "last", "--checkpoint.every_n_train_steps", "7", code=2
    )


def test_a_shipped_configuration_is_found_by_name_and_ones_own_comes_first(capsys: pytest.CaptureFixture[str]):
    def printed(name: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            main(["fit", "--config", name, "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)

    for name in ("digits_linear", "digits_linear.yaml", "configs/digits_linear.yaml"):
        assert printed(name)["trainer"]["default_root_dir"] == "runs/digits_linear"
    Path("digits_linear.yaml").write_text(yaml.safe_dump({**TINY, "seed_everything": 77}))
    for name in ("digits_linear", "digits_linear.yaml"):
        assert printed(name)["seed_everything"] == 77
    assert "did you mean digits_linear?" in fails(capsys, "fit", "--config", "digit_linear")


def test_every_configuration_is_named_after_its_runs():
    for config in CONFIGS:
        assert yaml.safe_load(config.read_text())["trainer"]["default_root_dir"] == f"runs/{config.stem}"


def test_an_integer_is_not_read_as_a_float():
    """In whatever order the types stand: `--trainer.limit_train_batches 1` is one batch, and 1.0 all of them."""
    parser = Parser()
    parser.add_argument("--n", type=Optional[Union[float, int]])  # noqa: UP007, UP045
    integers_first(parser)
    assert [repr(parser.parse_args([f"--n={text}"]).n) for text in ("1", "1.0", "null")] == ["1", "1.0", "None"]


def test_printing_the_configuration_trains_nothing(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", "tiny.yaml", "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["backbone"]["init_args"]["d_model"] == 16
    with pytest.raises(SystemExit):  # a class has its own defaults, not those of the class before
        main(["fit", "--config", "tiny.yaml", "--model.optimizer", "torch.optim.AdamW", "--print_config=skip_default"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert "skip_null leaves out null" in fails(capsys, "fit", "--config", "tiny.yaml", "--print_config=skip_null")
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------ checkpoints and flags


def test_resuming_goes_on_in_the_runs_folder(run: Path):
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "2"])
    assert runs() == [run]
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 1
    assert yaml.safe_load((run / "config_resumed_1.yaml").read_text())["trainer"]["max_epochs"] == 2


def test_settings_with_which_resuming_failed_are_not_those_of_the_next_command(capsys: pytest.CaptureFixture[str]):
    run = fit("--trainer.max_steps", "2", "--trainer.max_epochs", "-1")
    resume = ("fit", "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert "epoch 0 was interrupted after 2 of" in fails(capsys, *resume, "--data.batch_size", "512")
    main([*resume])
    assert yaml.safe_load((run / "config_resumed_1.yaml").read_text())["data"]["init_args"]["batch_size"] == 128


@pytest.mark.exhaustive  # tests/checkpoints/test_runs.py has the order of runs without training
def test_the_last_run_and_its_last_checkpoint_are_the_newest_after_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
):
    """Between two runs of two configurations, and between two saves of one run."""
    first = fit("--name", "first")
    clock = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=400))
    monkeypatch.setattr("lit_effattn.checkpoints.runs.datetime", clock)
    second = fit("--name", "second", "--trainer.max_epochs", "2")
    for path in (*second.rglob("*"), *first.rglob("*")):
        os.utime(path, (0, 0) if path.name == "last.ckpt" or second in path.parents else None)
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    assert runs() == [first, second]
    assert torch.load(first / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3
    steps = [torch.load(second / "checkpoints" / n, weights_only=True)["global_step"] for n in ("previous.ckpt", LAST)]
    assert steps == [6, 9]


def test_branching_off_another_checkpoint_begins_a_run(run: Path):
    before = (run / "checkpoints" / "last.ckpt").read_bytes()
    main(["fit", "--ckpt_path", str(run / "checkpoints" / "best.ckpt"), "--trainer.max_epochs", "2"])
    assert len(runs()) == 2
    assert (run / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_swapped_or_named_run_has_a_folder_of_its_own(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    config = {**TINY, "trainer": {**TINY["trainer"], "default_root_dir": "runs/tiny"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    swapped = ["--config", "tiny.yaml", "--model.backbone.attention", "SoftmaxAttention"]
    main(["fit", *swapped])
    main(["fit", *swapped, "--name", "other", "--trainer.limit_train_batches", "1"])
    assert {path.name for path in Path("runs").iterdir()} == {"tiny+SoftmaxAttention", "other"}
    for args, folder in ((swapped, "tiny+SoftmaxAttention"), (["--name", "other"], "other")):
        caplog.clear()
        main(["test", "--ckpt_path", "best", *args])
        assert re.search(rf"^test from runs/{re.escape(folder)}/.*/best\.ckpt$", "\n".join(caplog.messages), re.M)
    assert "no run under" in fails(capsys, "test", "--config", "tiny.yaml", "--ckpt_path", "best")
    assert "--name a/b: use letters" in fails(capsys, "fit", "--config", "tiny.yaml", "--name", "a/b")
    last = str(next(Path("runs").glob("other/*/checkpoints/last.ckpt")))
    assert "--name x: fit from" in fails(capsys, "fit", "--ckpt_path", last, "--name", "x")
    message = fails(capsys, "test", "--ckpt_path", last, "--trainer.default_root_dir", "elsewhere")
    assert "--trainer.default_root_dir elsewhere: test from runs/other/" in message
    assert "; leave --trainer.default_root_dir out\n" in message  # nothing of a new run
    main(["test", "--ckpt_path", last, "--trainer.default_root_dir", "runs"])
    main(["fit", "--ckpt_path", last, "--name", "other", "--trainer.max_epochs", "2"])
    assert len(list(Path("runs").glob("other/*"))) == 1


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(
    step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    train = PixelModel.training_step

    def failing(self: PixelModel, batch: torch.Tensor) -> Any:
        if self.global_step == step:
            raise ValueError("it fails")
        return train(self, batch)

    monkeypatch.setattr(PixelModel, "training_step", failing)
    assert "it fails" in fails(capsys, "fit", "--config", "tiny.yaml", "--trainer.logger", "true")
    assert Path("runs").exists() == (step > 0)  # what it logged of its steps stays


def test_the_best_k_are_kept_beside_a_checkpoint_callback_of_ones_own():
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor", "val/bits_per_dim"]
    own += ["--trainer.callbacks.dirpath", "own", "--trainer.callbacks.save_top_k", "1"]
    few = ["--trainer.limit_val_batches", "1", "--trainer.limit_train_batches", "1", "--trainer.max_epochs", "4"]
    rising = ["--model.optimizer.lr", "0.05", "--model.lr_scheduler", "null"]
    run = fit(*own, *few, *rising, "--checkpoint.save_top_k", "2", "--checkpoint.keep", "9")
    scores = {}  # of each step, by what Lightning has in the checkpoints
    for step in range(1, 5):
        saved = torch.load(run / "checkpoints" / f"step_{step:08d}.ckpt", weights_only=True)
        scores[step] = saved["logged"]["metrics"]["val/bits_per_dim"]
    best = sorted(scores, key=scores.__getitem__)[:2]
    assert {path.name for path in run.glob("checkpoints/top_*")} == {f"top_{step:08d}.ckpt" for step in best}
    assert torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["global_step"] == best[0]
    (path,) = Path("own").iterdir()
    assert torch.load(path, weights_only=True)["global_step"] == best[0]
    # The same words again, to resume: the run's own list has the callback already.
    main(["fit", "--config", "tiny.yaml", *own, *few, *rising, "--ckpt_path", str(run), "--trainer.max_epochs", "5"])
    assert len(yaml.safe_load((run / "config_resumed_1.yaml").read_text())["trainer"]["callbacks"]) == 1


def test_a_flag_wins_over_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]):
    results = []
    for flags in ([], ["--model.score_first", "false"]):
        capsys.readouterr()
        main(["test", "--ckpt_path", "last", *flags])
        results.append(re.search(r"test bits/dim: (\S+)", capsys.readouterr().out)[1])
    assert results[0] != results[1]


def test_settings_of_the_run_that_a_configuration_overrides_are_told(run: Path, caplog: pytest.LogCaptureFixture):
    given = ["--config", "tiny.yaml", "--model.score_first", "false"]
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    main(["test", "--ckpt_path", str(run), *given])
    assert "overrides" not in caplog.text
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY).replace("RAdam", "Adam"))
    with pytest.warns(UserWarning, match="the run: model.optimizer is Adam, in the run RAdam. --name and"):
        main(["test", "--ckpt_path", str(run), *given])
    changed = {**TINY, "data": spec("PixelSequences", dataset="digits", batch_size=64)}
    changed["trainer"] = {**TINY["trainer"], "callbacks": [spec("FeatureRedraw")]}
    Path("tiny.yaml").write_text(yaml.safe_dump(changed))
    data = "data.batch_size is 64, in the run 128"
    with pytest.warns(UserWarning, match=f"the run: {data}. --name"):
        main(["test", "--ckpt_path", str(run), *given])
    with pytest.warns(
        UserWarning, match=f"the run: {data}; trainer.callbacks is FeatureRedraw, in the run none. --name"
    ):
        main(["fit", "--ckpt_path", str(run), *given, "--trainer.max_epochs", "2"])


def test_a_flag_that_resuming_would_drop_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    before = (run / "checkpoints" / "last.ckpt").read_bytes()
    for flags, words in (
        (["--model.backbone.n_layers", "1"], "another model"),
        (["--model.lr_scheduler.warmup_steps", "1"], "model.lr_scheduler"),
        (["--model.optimizer.lr", "0.5"], "model.optimizer"),
    ):
        assert words in fails(capsys, "fit", "--ckpt_path", "last", *flags)
    assert (run / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_patience_that_resuming_would_drop_is_refused(capsys: pytest.CaptureFixture[str]):
    """Also in a list that takes the place of the run's callbacks. Other options are those of the new list."""
    stopping = "[{class_path: EarlyStopping, init_args: {monitor: val/bits_per_dim, patience: %s, min_delta: %s}}]"
    fit("--trainer.callbacks", stopping % (5, 0.0))
    resume = ("fit", "--ckpt_path", "last", "--trainer.max_epochs", "2", "--trainer.callbacks")
    assert "EarlyStopping has patience=9 here and 5 in the" in fails(capsys, *resume, stopping % (9, 0.0))
    main([*resume, stopping % (5, 0.1)])


def test_fine_tuning_starts_from_another_kinds_weights():
    first = fit("--model.backbone.attention", "SoftmaxAttention")
    second = fit("--init_weights", "last", "--model.optimizer.lr", "0.0")  # which leaves the weights as they are
    assert same(weights(first / "checkpoints" / "last.ckpt"), weights(second / "checkpoints" / "last.ckpt"))
    settings = yaml.safe_load((second / "config.yaml").read_text())
    named = settings["init_weights"]  # "last" is now another one
    assert Path(named).resolve() == (first / "checkpoints" / "last.ckpt").resolve()
    model = PixelModel.load_from_checkpoint(second / "checkpoints" / "last.ckpt")
    assert isinstance(model.backbone.blocks[0].attention, LinearAttention)
    # If the account's key was lost, its configuration is given: its initial weights are not needed any more.
    (first / "checkpoints" / "last.ckpt").unlink()
    more = ["--ckpt_path", str(second), "--trainer.max_epochs", "2"]
    main(["fit", "--config", str(second / "config.yaml"), *more])
    assert (second / "config_resumed_1.yaml").exists()


def test_a_checkpoint_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]):
    for name, path in (("fit", "last"), ("test", "best"), ("generate", "nowhere.ckpt"), ("test", "null")):
        assert f"--ckpt_path {path}" in fails(capsys, name, "--config", "tiny.yaml", "--ckpt_path", path)
    assert "test needs a trained model: give --ckpt_path" in fails(capsys, "test", "--config", "tiny.yaml")
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------ mistakes


def test_a_metric_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]):
    watch = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/los"]
    output = fails(capsys, "fit", "--config", "tiny.yaml", *watch)
    assert "Early stopping conditioned on metric `val/los` which is not available" in output
    assert "val/bits_per_dim" in output


def test_weights_of_another_shape_are_no_start(run: Path, capsys: pytest.CaptureFixture[str]):
    output = fails(capsys, "fit", "--config", "tiny.yaml", "--init_weights", "last", "--model.backbone.d_model", "8")
    assert "checkpoints/last.ckpt: the checkpoint holds another model than this PixelModel: " in output
    assert "they are in its config.yaml" in output


def test_help_version_and_words_that_are_no_command(capsys: pytest.CaptureFixture[str]):
    for args in (["-h"], ["--help"], ["--version"]):
        main(args)
        assert "lit-effattn" in capsys.readouterr().out
    assert "'train' is not a command" in fails(capsys, "train", code=2)


def test_the_error_of_a_worker_is_that_of_its_data():
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\nValueError: a.png"
    assert _message(ValueError(text)) == "a.png"
    assert _message(KeyError()) == "KeyError"


def test_a_run_in_which_another_process_trains_is_not_resumed(run: Path, capsys: pytest.CaptureFixture[str]):
    lock = RunLock(run)
    before = sorted(path.name for path in run.rglob("*"))
    output = fails(capsys, "fit", "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert f"another fit writes into {run}: process {os.getpid()} on " in output
    main(["test", "--ckpt_path", "last"])
    assert sorted(path.name for path in run.rglob("*")) == before
    lock.release()
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "2"])


def test_a_run_that_cannot_be_written_to_is_scored_and_sampled_from(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    before = sorted(run.rglob("*"))
    real = tempfile.TemporaryFile

    def refuse(*args, dir=None, **options):
        if dir is not None and Path(dir).resolve() == run.resolve():
            raise OSError(errno.EROFS, "Read-only file system")
        return real(*args, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    other = Path(f"runs_{run.name}")
    main(["test", "--ckpt_path", "last", "--trainer.logger", "true"])
    output = f"{run} can't be written to (Read-only file system): results go to {other}"
    assert output in caplog.text
    main(["generate", "--ckpt_path", "last", "--n", "1"])
    main(["predict", "--ckpt_path", "last"])
    assert sorted(run.rglob("*")) == before
    assert (other / "generated" / "samples" / "samples.png").is_file()
    assert len(list(other.rglob("predictions.csv"))) == 1


# ------------------------------------------------------------------------------------------------ damaged checkpoints


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(255 - byte for byte in data[middle : middle + 64])
    path.write_bytes(data)


def test_training_goes_on_from_the_one_before_a_damaged_one(capsys: pytest.CaptureFixture[str]):
    run = fit("--trainer.max_epochs", "2")
    folder = run / "checkpoints"
    before = torch.load(folder / "previous.ckpt", weights_only=True)
    damage(folder / "last.ckpt")
    damaged = "last.ckpt is damaged: the checksum of the whole file is wrong"
    assert f"{damaged}; name another checkpoint" in fails(capsys, "test", "--ckpt_path", "last")
    with pytest.warns(
        UserWarning, match=r"last\.ckpt is damaged: .* goes on from .*previous\.ckpt, saved at step 3: later"
    ):
        main(["fit", "--ckpt_path", "last"])
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
        "set_aside.ckpt",
    ]
    assert before["global_step"] == 3
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 6
    (folder / "last.ckpt").rename(folder / "previous.ckpt")
    with pytest.warns(UserWarning, match=r"there is no .*last\.ckpt\. Training goes on from .* saved at step 6"):
        main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    assert len(runs()) == 1
    for name in ("last.ckpt", "previous.ckpt"):
        damage(folder / name)
    assert f"{damaged}, and so is previous.ckpt; name" in fails(capsys, "fit", "--ckpt_path", "last")


def test_a_run_that_is_not_finite_stops_with_a_good_checkpoint(capsys: pytest.CaptureFixture[str]):
    flags = ["--trainer.max_epochs", "4", "--checkpoint.every_n_train_steps", "1", "--trainer.log_every_n_steps", "4"]
    output = fails(capsys, "fit", "--config", "tiny.yaml", "--model.optimizer.lr", "1e30", *flags)
    assert "is infinite or NaN at step 2 (epoch 0, batch 1, lr " in output
    assert "--trainer.callbacks+=CheckFinite" in output
    (run,) = runs()
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]
    assert all(weight.isfinite().all() for weight in checkpoint["state_dict"].values())


@pytest.mark.parametrize("began", [[], ["--ckpt_path", "best"]], ids=["new", "from another run"])
def test_a_requeued_slurm_job_goes_on_in_the_same_run(began: list[str], monkeypatch: pytest.MonkeyPatch):
    """With the settings with which it began, whatever its files say now and its words name now."""
    if began:
        fit()
    Path("bin").mkdir()
    Path("bin/scontrol").write_text('#!/bin/sh\necho "$@" >> asked\n')
    Path("bin/scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")
    environment = {"JOB_ID": "77", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = ["fit", "--config", "tiny.yaml", *began, "--trainer.max_epochs", "2"]
    job += ["--trainer.callbacks+=tests.support.interruptions.SignalAt"]
    job += ["--trainer.callbacks.step", "4" if began else "1"]
    job += ["--trainer.callbacks.number", str(int(signal.SIGUSR1))]
    with pytest.raises(SystemExit) as stopped:
        main(job)
    assert stopped.value.code == 138
    assert Path("asked").read_text() == "requeue 77\n"
    run = max(runs())
    step = torch.load(run / "checkpoints" / LAST, weights_only=True)["global_step"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY | {"seed_everything": 4}))
    main(job)  # the same command
    assert torch.load(run / "checkpoints" / LAST, weights_only=True)["global_step"] == 6
    assert step < 6
    assert len(runs()) == 1 + len(began) // 2
    resumed = yaml.safe_load((run / "config_resumed_1.yaml").read_text())
    assert (resumed["seed_everything"], resumed["ckpt_path"]) == (3, None)


# ------------------------------------------------------------------------------------------------ processes


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_stop_together_if_the_loss_is_not_finite():
    stopped = launched(
        "fit", "--config", "tiny.yaml", "--model.optimizer.lr", "1e30", "--trainer.log_every_n_steps", "2", *TWO
    )
    assert stopped.returncode == 1
    assert "infinite or NaN at step 2" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def interrupted(root: str, callback: str, step: int, *args: str) -> subprocess.CompletedProcess[str]:
    flags = [f"--trainer.callbacks+=interruptions.{callback}", "--trainer.callbacks.step", str(step)]
    return command("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", root, *LONG, *flags, *args)


LONG = ["--trainer.max_epochs", "3", "--trainer.limit_train_batches", "1.0"]  # 33 steps


@pytest.mark.exhaustive  # test_command_text.py has one with a memory
@pytest.mark.processes
@pytest.mark.parametrize("processes", [[], TWO], ids=["one", "two"])
def test_a_killed_run_resumes_to_the_same_weights(processes: list[str]):
    step = "17" if not processes else "8"  # in the middle of the second epoch
    ends("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "whole", *LONG, *processes)
    kill = ["--trainer.callbacks.number", str(int(signal.SIGKILL)), "--checkpoint.every_n_train_steps", "3"]
    killed = interrupted("killed", "SignalAt", int(step), *kill, *processes)
    assert killed.returncode != 0
    assert 0 < torch.load(last("killed"), weights_only=True)["global_step"] < int(step)
    resume = ["--ckpt_path", "last", "--trainer.default_root_dir", "killed", "--trainer.callbacks", "null"]
    ends("fit", *resume, two=bool(processes))
    assert_same_end(last("whole"), last("killed"))


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_score_as_one(run: Path):
    one, two = (ends("test", "--ckpt_path", "best", *processes) for processes in ([], TWO))
    assert re.search(r"test bits/dim: \S+", one)[0] == re.search(r"test bits/dim: \S+", two)[0]


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [[], TWO], ids=["one", "two"])
def test_sigterm_saves_and_exits_with_143(processes: list[str]):
    terminate = ["--trainer.callbacks.number", str(int(signal.SIGTERM)), "--trainer.callbacks.every_rank", "false"]
    stopped = interrupted("stopped", "SignalAt", 4, *terminate, *processes)
    assert stopped.returncode == 143, stopped.stderr
    assert torch.load(last("stopped"), weights_only=True)["global_step"] == 5


def test_a_full_disk_leaves_the_last_good_checkpoint(capsys: pytest.CaptureFixture[str]):
    full = ["--trainer.callbacks+=tests.support.interruptions.FullDiskAt", "--trainer.callbacks.step", "4"]
    saving = ["--checkpoint.every_n_train_steps", "2", "--trainer.max_epochs", "2", "--trainer.limit_val_batches", "1"]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        message = fails(capsys, "fit", "--config", "tiny.yaml", *saving, *full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "last.ckpt could not be written" in message
    assert "intact" in message
    assert torch.load(last("runs"), weights_only=True)["global_step"] == 4
    assert not list(Path("runs").rglob("*.part"))
    main(["fit", "--ckpt_path", "last", "--trainer.callbacks", "null"])
    assert torch.load(last("runs"), weights_only=True)["global_step"] == 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_while_logging_names_the_run(number: int, monkeypatch: pytest.MonkeyPatch, capsys):
    """The error of a file that is written names none."""

    def full(self: CSVLogger) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(CSVLogger, "save", full)
    message = fails(capsys, "fit", "--config", "tiny.yaml", "--trainer.logger", "true", "--name", "full")
    assert f"{os.strerror(number)}: 'runs/full/2" in message
