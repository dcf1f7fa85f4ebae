"""Mistakes that end in one line: options without their group, settings in YAML, other commands than fit."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lit_effattn.cli import main
from tests.support.commands import fails, spec

TINY = {
    "model": spec(
        "PixelModel",
        backbone=spec("Transformer", d_model=8, n_heads=2, n_layers=1),
        optimizer=spec("torch.optim.AdamW", lr=0.001),
    ),
    "data": spec("PixelSequences", dataset="digits", batch_size=8),
    "trainer": {"max_steps": 1, "limit_val_batches": 1, "enable_progress_bar": False, "logger": False},
}


LAUGHS = "a: &a [ha], " + ", ".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghi")
)
"""Settings that grow to 9⁸ by aliases."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, the checkpoint of a trained model, and files that are neither."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (folder / "empty.yaml").touch()
    (folder / "option.yaml").write_text("trainer: {max_epoch: 3}")
    (folder / "section.yaml").write_text("modle: {class_path: PixelModel}")
    (folder / "tab.yaml").write_text("trainer:\n\tmax_steps: 1")
    (folder / "number.yaml").write_text("data: 5")
    (folder / "trainer.yaml").write_text("trainer: 7")
    (folder / "laughs.yaml").write_text(f"trainer: {{{LAUGHS}}}")
    (folder / "circle.yaml").write_text("model: &m {class_path: PixelModel, init_args: *m}")
    (folder / "long.yaml").write_text("# x\n" * 2**18 + "trainer: {max_steps: 1}")
    (folder / "digits.yaml").write_text(f"data: {'9' * 5000}")
    (folder / "part.yaml").write_text("class_path: Transformer\ninit_args: {d_model: 8\n")
    (folder / "whole.yaml").write_text("model: {class_path: PixelModel, init_args: {backbone: sub/part.yaml}}")
    (folder / "sub").mkdir()
    (folder / "images").mkdir()
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "list.yaml").write_text("- 1")
    (folder / "twice.yaml").write_text("trainer: {max_steps: 1}\nseed_everything: 1\ntrainer: {max_epochs: 1}\n")
    (folder / "sub" / "part.yaml").write_text(f"class_path: Transformer\ninit_args: {{{LAUGHS}}}")
    (folder / "text.ckpt").write_text("no checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", "--config", "tiny.yaml"])
        next(folder.rglob("last.ckpt")).rename(folder / "pixels.ckpt")
    return folder


def _said(folder: Path, args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return fails(capsys, *args, code=code)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "0.1"], "there is no option --lr; did you mean --model.optimizer.lr?"),
        (["--batch_size=3"], "there is no option --batch_size; did you mean --data.batch_size?"),
        (["--d_model", "3"], "did you mean --model.backbone.d_model?"),
        (["--n_hash", "3"], "did you mean --model.backbone.attention.n_hashes?"),
        (["--warmup_steps", "3"], "did you mean --model.lr_scheduler.warmup_steps?"),
        (["--max_epochs", "3"], "did you mean --trainer.max_epochs?"),
        (["--optimizer", "Adam"], "did you mean --model.optimizer?"),
        (["--modle.backbone.d_model", "3"], "did you mean --model.backbone.d_model?"),
        (["--model.lr", "3"], "PixelModel has no option 'lr'; did you mean --model.optimizer.lr?"),
        (["--model.backbone.lr", "3"], "Transformer has no option 'lr'; did you mean --model.optimizer.lr?"),
        (["--model.batch_size", "3"], "PixelModel has no option 'batch_size'; did you mean --data.batch_size?"),
        (["--model.optimzer.lr", "3"], "PixelModel has no option 'optimzer'; did you mean optimizer?"),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr", "x"],
            "EarlyStopping has no option 'monitr'; did you mean monitor?",
        ),
        (
            ["--model.lr_scheduler", "ReduceLROnPlateau", "--model.lr_scheduler.monitor", "x"],
            "several classes are called ReduceLROnPlateau; give one of lightning.pytorch.cli.ReduceLROnPlateau, torch.",
        ),
        (["--trainer.logger", "Wandb"], "there is no class 'Wandb'; did you mean WandbLogger?"),
        (["--config", "option.yaml"], "there is no option --trainer.max_epoch; did you mean --trainer.max_epochs?"),
        (["--config", "section.yaml"], "there is no option --modle; did you mean --model?"),
        (["digits_linear"], "its option; did you mean --config digits_linear?"),
        (["--model.backbone", "none.yaml"], "model.backbone: there is no file none.yaml, or it holds no settings"),
        (["--quite_another", "3"], "there is no option --quite_another\n"),
        (["--data.source", "mnist"], "PixelSequences has no option 'source'; there are dataset, "),
        (["--model.backbone", "{d_model: 1, d_model: 2}"], "model.backbone can't be read: the key 'd_model' is th"),
        (["--config", "number.yaml"], "data=5 is not a LightningDataModule: give the name of a class"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_that_is_not_there(flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert words in _said(folder, ["fit", "--config", "tiny.yaml", *flags], 2, capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config"], "--config has no value"),
        (["--config", "list.yaml"], "--config list.yaml holds a list, not settings"),
        (["--config", "images"], "--config images: this is a folder"),
        (["--config", "image.png"], "--config image.png is not text"),
        (["--config", "nothing/like/it.yaml"], "`lit-effattn configs` lists those"),
        (["--config", "twice.yaml"], "the key 'trainer' is there twice, lines 1 and 3; join them"),
        (["--config", "empty.yaml"], "--config empty.yaml holds nothing, not settings"),
        (["--config", "tab.yaml"], "--config tab.yaml is not YAML in line 2, column 1"),
        (["--config", "laughs.yaml"], "--config laughs.yaml can't be read: it has more than 100,000 nodes"),
        (["--config", "circle.yaml"], "circle.yaml can't be read: an alias is inside the node that it names"),
        (["--config", "long.yaml"], "long.yaml can't be read: it has more than 1,048,576 characters"),
        (["--config", "digits.yaml"], "digits.yaml can't be read: Exceeds the limit (4300 digits)"),
        (["--config", "whole.yaml"], "sub/part.yaml can't be read: it has more than 100,000 nodes"),
        (["--config", "tiny.yaml", "--model.backbone", "part.yaml"], "part.yaml is not YAML in line 3, column 1"),
        (["--config", "tiny.yaml", "--model", f"{{{LAUGHS}}}"], "--model can't be read: it has more than 100,000"),
        (["--config", "trainer.yaml"], "--config trainer.yaml: trainer is 7, not settings"),
        (["-ckpt_path", "last"], "-ckpt_path: options begin with --"),
        (["--ckpt_path", "text.ckpt"], "text.ckpt (13 bytes) can't be read as a checkpoint"),
        (["--ckpt_path", "."], "--ckpt_path .: there is no such file, nor a run's folder"),
        (["--model.n_levels", "4"], "--model.n_levels can't be given"),
        (["--trainer.strategy", "dpd"], "You selected an invalid strategy name: `strategy='dpd'`"),
        (["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"], "--trainer.strategy starts processes by fork"),
        (["--trainer.gradient_clip_val", "-1"], "--trainer.gradient_clip_val -1 must be at least 0"),
        (
            ["--ckpt_path", "pixels.ckpt", "--model.optimizer.lr", "0.5"],
            "--model.optimizer.lr is 0.5 here and 0.001 in the checkpoint, and resuming keeps the checkpoint's "
            "optimizer: leave it unchanged, or start a new run from these weights with --init_weights",
        ),
        (
            ["--ckpt_path", "pixels.ckpt", "--model.optimizer", "SGD", "--model.optimizer.lr", "0.5"],
            "--model.optimizer is SGD here and AdamW in the checkpoint",
        ),
        (["--model.backbone.n_heads", "3"], "n_heads=3 does not divide d_model=8"),
        (["--data.dataset", "folder", "--data.root", "absent", "--data.image_size", "8"], "absent"),
        (["--init_weights", "last", "--name", "other"], "--init_weights last: no run under"),
        (["--init_weights", "absent.ckpt"], "--init_weights absent.ckpt: there is no such file"),
        (["--trainer.logger", "WandbLogger"], "Requirement 'wandb>="),
        (["--checkpoint.save_top_k", "2", "--trainer.limit_val_batches", "0"], "save_top_k=2 needs a validation"),
        (["--trainer.val_check_interval", "0"], "--trainer.val_check_interval 0: give at least 1"),
        (["--trainer.max_steps", "0"], "--trainer.max_steps 0: give at least 1, or -1 for no limit"),
        (["--trainer.limit_train_batches", "0"], "--trainer.limit_train_batches 0: fit would do nothing"),
        (["--seed_everything", "-1"], "--seed_everything -1 must be from 0 to 4294967295"),
        (["--seed_everything", "4294967296"], "--seed_everything 4294967296 must be from 0 to 4294967295"),
        (["--trainer.max_time", "{second: 3}"], "the trainer can't be built: 'second' is an invalid keyword"),
        (["--trainer.callbacks", "LearningRateFinder"], "LearningRateFinder sets an attribute that nothing here"),
        (["--trainer.devices", "two"], "--trainer.devices two: give a number"),
        (["--trainer.accumulate_grad_batches", "0"], "--trainer.accumulate_grad_batches 0 must be"),
        (["--trainer.default_root_dir", "tiny.yaml"], "Not a directory: 'tiny.yaml/"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_value_that_lightning_would_take(
    flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert words in _said(folder, ["fit", "--config", "tiny.yaml", *flags], 1, capsys)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["test", "--init_weights", "x"], 2, "there is no option --init_weights here: it is one of fit"),
        (["validate", "--checkpoint.keep", "3"], 2, "there is no option --checkpoint.keep here: it is one of fit"),
        (["generate", "--temprature", "1"], 2, "did you mean --temperature?"),
        (["generate", "--prompt", "hello"], 1, "--prompt hello: PixelModel has no such option"),
        (["generate", "--seed_everything", "5"], 1, "--seed_everything 5: samples depend on --seed alone"),
        (["generate", "--data.batch_size", "3"], 1, "--data.batch_size: generate reads data for --complete alone"),
        (["test", "--average", "many"], 1, "--average many must be a number of checkpoints"),
        (["predict", "--data.audio", "x.wav"], 2, "PixelSequences has no option 'audio'"),
        (["test", "--model", "LanguageModel"], 1, "LanguageModel takes vocab_size from the data"),
        (["data", "--model", "X"], 2, "there is no option --model here: it is one of fit\n"),
        (["data", "--trainer.max_steps", "3"], 2, "there is no option --trainer.max_steps here: it is one of fit\n"),
        (["data", "--name", "x"], 2, "there is no option --name here: it is one of fit\n"),
        (["data", "--prompt", "x"], 2, "there is no option --prompt here: it is one of generate\n"),
        (["data", "--backbon", "x"], 2, "there is no option --backbon\n"),
        (["data", "--batch_sice", "x"], 2, "there is no option --batch_sice; did you mean --data.batch_size?\n"),
        (["fit", "--average", "3"], 2, "there is no option --average here: it is one of test\n"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_of_other_commands(args: list[str], code: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = [] if args[0] in ("data", "fit") else ["--ckpt_path", "pixels.ckpt"]
    assert words in _said(folder, [*args, "--config", "tiny.yaml", *checkpoint], code, capsys)
