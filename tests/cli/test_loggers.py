"""A logger of the user's own stands beside the log from which `compare` and `report` read a run."""

import sqlite3
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_effattn.analysis.records import RunRecord, read_run
from lit_effattn.cli import main
from tests.support.commands import last, spec

TINY = {
    "model": spec("PixelModel", backbone=spec("Transformer", d_model=8, n_heads=2, n_layers=1)),
    "data": spec("PixelSequences", dataset="digits", batch_size=64),
    "trainer": {
        **{"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1, "log_every_n_steps": 1},
        "enable_progress_bar": False,
    },
}
MEASURED = {"train/bits_per_dim": {0, 1, 2, 3}, "val/bits_per_dim": {1, 3}}
"""The steps at which each metric is logged."""


def fit(*args: str) -> RunRecord:
    main(["fit", "--config", "tiny.yaml", *args])
    return read_run(last("runs").parent.parent)


def assert_complete(run: RunRecord) -> None:
    assert {name: set(curve) for name, curve in run.curves.items() if "/" in name} == MEASURED
    assert set(run.seconds) == {0, 1, 2, 3}
    assert run.peak_memory
    assert not run.remark


class Recorder(Logger):
    """Keeps what it is given."""

    settings: ClassVar[list[dict[str, Any]]] = []
    metrics: ClassVar[dict[str, set[int]]] = {}

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.settings.append(dict(params))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name in metrics:
            self.metrics.setdefault(name, set()).add(-1 if step is None else step)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    module = ModuleType("my_loggers")
    vars(module)["Recorder"] = kind = type("Recorder", (Recorder,), {"settings": [], "metrics": {}})
    kind.__module__ = "my_loggers"
    monkeypatch.setitem(sys.modules, "my_loggers", module)
    return kind


def test_a_run_with_a_logger_of_ones_own_is_recorded_in_full(recorder: type[Recorder]):
    run = fit("--trainer.logger", "my_loggers.Recorder")
    assert_complete(run)
    main(["validate", "--ckpt_path", str(last("runs")), "--trainer.logger", "my_loggers.Recorder"])
    assert_complete(read_run(run.path))
    assert not (run.path / "tensorboard").exists()
    assert {name: steps for name, steps in recorder.metrics.items() if "bits" in name} == MEASURED
    assert "cost/seconds" in recorder.metrics
    (settings,) = recorder.settings
    assert settings["model.backbone.d_model"] == 8
    assert settings["trainer.logger"] == "Recorder"
    more = ["--trainer.logger", "my_loggers.Recorder", "--trainer.max_steps", "6"]
    main(["fit", "--ckpt_path", str(last("runs")), *more])
    assert len(recorder.settings) == 1  # MLflow would reject those of the resumed run
    assert max(read_run(run.path).curves["train/bits_per_dim"]) == max(recorder.metrics["train/bits_per_dim"]) == 5


def test_several_loggers(recorder: type[Recorder]):
    own = ["--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir", "events"]
    assert_complete(fit(*own, "--trainer.logger+=my_loggers.Recorder"))
    assert recorder.metrics["val/bits_per_dim"] == {1, 3}
    (written,) = {path.parent for path in Path("events").rglob("events*")}
    events = EventAccumulator(str(written)).Reload()
    assert [event.step for event in events.Scalars("val/bits_per_dim")] == [1, 3]


def test_scores_are_logged_beside_ones_own_logger_too(recorder: type[Recorder]):
    run = fit("--trainer.logger", "false")
    assert not (run.path / "csv").exists()
    main(["test", "--ckpt_path", str(last("runs")), "--trainer.logger", "my_loggers.Recorder"])
    assert recorder.metrics["test/bits_per_dim"]
    assert "test/bits_per_dim" in read_run(run.path).final
    assert recorder.settings == []


def test_an_empty_list_of_loggers_is_no_log():
    assert not (fit("--trainer.logger", "[]").path / "csv").exists()


def test_a_trial_writes_no_log(recorder: type[Recorder]):
    main(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "1", "--trainer.logger", "my_loggers.Recorder"])
    assert recorder.metrics == {}
    assert {path.name for path in Path().iterdir()} == {"tiny.yaml"}


def test_weights_and_biases_offline(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    pictures = ["--trainer.callbacks+=SampleGrid", "--trainer.callbacks.n_samples", "1"]
    assert_complete(fit("--trainer.logger", "WandbLogger", "--trainer.logger.project", "digits", *pictures))
    assert list(Path("wandb").glob("offline-run-*/*.wandb"))
    assert list(Path("wandb").glob("offline-run-*/files/media/images/samples_*.png"))


def test_mlflow_in_a_file():
    pytest.importorskip("mlflow")
    assert_complete(fit("--trainer.logger", "MLFlowLogger", "--trainer.logger.tracking_uri", "sqlite:///mlflow.db"))
    with sqlite3.connect("mlflow.db") as database:
        steps = database.execute("select step from metrics where key = 'val/bits_per_dim' order by step").fetchall()
        width = database.execute("select value from params where key = 'model.backbone.d_model'").fetchall()
    assert (steps, width) == ([(1,), (3,)], [("8",)])
