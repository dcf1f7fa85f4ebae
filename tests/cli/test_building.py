"""What the command builds: the model, its data and the trainer; nothing is trained."""

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from lit_effattn.cli import main
from lit_effattn.cli.command import CLI

TINY = [
    *("fit", "--config", "digits_linear", "--model.backbone.n_layers", "1", "--model.backbone.d_model", "16"),
    *("--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"),
    *("--trainer.logger", "false"),
]


class Loaders(pl.LightningDataModule):
    """Counts the loaders that are asked for."""

    asked: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.image_shape, self.n_levels = (2, 2, 1), 4

    def train_dataloader(self) -> Any:
        self.asked.append("train")
        return torch.utils.data.DataLoader(torch.randint(4, (8, 4), dtype=torch.uint8), batch_size=4)

    val_dataloader = train_dataloader


def built(monkeypatch: pytest.MonkeyPatch, *args: str, command: Sequence[str] = TINY) -> CLI:
    made: list[CLI] = []
    with monkeypatch.context() as patch:
        patch.setattr(CLI, "_run_subcommand", lambda self, _: made.append(self))
        main([*command, *args])
    return made[0]


def saved(monkeypatch: pytest.MonkeyPatch, *args: str) -> Path:
    """Save the checkpoint of a model that is not trained."""
    made = built(monkeypatch, "--trainer.fast_dev_run", "1", *args)
    made.trainer.strategy.connect(made.model)
    made.trainer.save_checkpoint("model.ckpt")
    return Path("model.ckpt")


def test_a_model_of_the_command_can_be_copied_and_pickled(monkeypatch: pytest.MonkeyPatch):
    """Its factories are of the classes alone, with the options that were given."""
    model = built(monkeypatch, "--model.optimizer", "torch.optim.AdamW", "--model.optimizer.lr", "0.25").model
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, model.parameters(), other.parameters()))
        optimizer = other.configure_optimizers()
        optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.param_groups[0]["initial_lr"] == 0.25


def test_no_loader_is_built_before_training(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loaders, "asked", asked := [])
    cli = built(monkeypatch, "--data", f"{__name__}.Loaders")
    assert cli.model.image_shape == (2, 2, 1)
    assert asked == []


def test_a_configuration_has_what_callbacks_were_given(monkeypatch: pytest.MonkeyPatch):
    """Words of an enumeration, functions that are named, and devices."""
    pruning = "{class_path: ModelPruning, init_args: {pruning_fn: l1_unstructured}}"
    averaging = "{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}"
    settings = built(monkeypatch, "--trainer.callbacks", f"[Timer, {pruning}, {averaging}]").settings
    timer, pruning, averaging = (callback["init_args"] for callback in settings["trainer"]["callbacks"])
    assert (timer["interval"], pruning["pruning_fn"], averaging["device"]) == ("step", "l1_unstructured", "cpu")


def test_a_run_that_wrote_nothing_leaves_no_folder(monkeypatch: pytest.MonkeyPatch):
    root = Path(built(monkeypatch).trainer.default_root_dir)
    assert root.is_relative_to("runs")
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["generate", "predict"])
def test_a_command_of_one_process_takes_one_device_of_several(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CPUAccelerator, "auto_device_count", lambda: 2)
    made = built(monkeypatch, command=[name, "--ckpt_path", "model:digits", "--trainer.logger", "false"])
    assert made.trainer.num_devices == 1


def test_what_a_checkpoint_lacks_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Softmax attention has no random features; its other weights start those of its Performer twin."""
    path = saved(monkeypatch, "--model.backbone.attention", "SoftmaxAttention")
    twin = built(monkeypatch, "--model.backbone.attention", "PerformerAttention", "--init_weights", str(path))
    before = {name: t.clone() for name, t in twin.model.state_dict().items()}
    caplog.clear()
    twin.before_fit()
    assert "Not in the checkpoint, so kept as this model initialised them: omega (1×), draws (1×)" in caplog.messages
    weights = torch.load(path, weights_only=True)["state_dict"]
    for name, value in twin.model.state_dict().items():
        assert torch.equal(value, weights[name] if name in weights else before[name])


def test_a_stride_is_that_of_the_user_else_that_of_the_data(monkeypatch: pytest.MonkeyPatch):
    """A row of the images has 8 pixels."""
    sparse = ["--model.backbone.attention", "SparseAttention"]
    for flags, stride in ((sparse, 8), ([*sparse, "--model.backbone.attention.stride", "5"], 5)):
        made = built(monkeypatch, *flags)
        assert made.model.backbone.blocks[0].attention.stride == stride
        assert f"'stride': {stride}" in repr(made.settings["model"])


def test_a_file_names_other_files_as_before_without_the_sections_of_fit(monkeypatch: pytest.MonkeyPatch):
    """A command that is not `fit` leaves them out; names of files stay relative to the file's folder."""
    path = saved(monkeypatch, "--model.backbone.attention", "SoftmaxAttention")
    Path("mine").mkdir()
    Path("mine/attention.yaml").write_text("{class_path: SoftmaxAttention, init_args: {window: 3}}")
    backbone = "{class_path: Transformer, init_args: {attention: attention.yaml}}"
    Path("mine/run.yaml").write_text(
        f"model: {{class_path: PixelModel, init_args: {{backbone: {backbone}}}}}\ncheckpoint: {{keep: 3}}\n"
    )
    made = built(monkeypatch, command=["test", *TINY[1:], "--ckpt_path", str(path), "--config", "mine/run.yaml"])
    assert made.model.backbone.blocks[0].attention.window == 3
