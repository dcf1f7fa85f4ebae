"""The folder that a command writes to, and the configuration of a run in it.

runs/digits_linear/                     --config digits_linear, whose default_root_dir it is
runs/digits_linear+SoftmaxAttention/    the same with --model.backbone.attention SoftmaxAttention
runs/wide/                              with --name wide
"""

import os
import re
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.own_runs import marked
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, check_contained, new_run, output_folder, short
from lit_effattn.hparams import flat
from lit_effattn.settings.arguments import Arguments, Settings
from lit_effattn.settings.tools import ROOT
from lit_effattn.settings.yaml_text import dump_yaml

RUN = "LIT_EFFATTN_RUN"  # environment variable with the folder of the run, set for the processes that DDP starts

_SWAPPED = ("model", "backbone", "encoder", "decoder", "attention", "cross_attention")
"""Options whose classes are part of the name of a run."""


def stated_root(arguments: Arguments) -> Path:
    """Return the folder that flags or files name for the runs of this configuration, or that of all runs."""
    return Path(arguments.stated.text("trainer.default_root_dir") or ROOT)


def root_of(arguments: Arguments) -> Path:
    """Return the folder for the runs of a command, and for `last` and `best`.

    A folder that a file names after itself is for the runs of this configuration. If flags swap classes, the folder is
    one beside it, with the names of these classes.

    Raises:
        ValueError: If the name is not valid for a folder.
    """
    root, name = stated_root(arguments), arguments.stated.text("name")
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"--name {name}: use letters, digits and _ . + - only; it is the name of a folder")
    by_flag = arguments.flags.given("trainer.default_root_dir")
    files = [] if by_flag else [file for file in arguments.files if Path(file.path).stem == root.name]
    if not files:
        return root if name is None else root / name
    return root.with_name("+".join([root.name, *_swapped(files[-1], arguments.flags)]) if name is None else name)


def _swapped(file: Settings, flags: Settings) -> list[str]:
    """Return the classes that flags name in place of those in a file, in the order of the flags."""
    swapped: dict[str, list[str]] = {}
    for path, names in flags.named():
        if path.startswith("model") and path.rpartition(".")[2] in _SWAPPED:
            swapped[path] = names if names != file.classes(path) else []
    return [name for names in swapped.values() for name in names]


def run_folder(command: str, checkpoint: Path | None, root: Path) -> tuple[Path, bool]:
    """Return the folder that this process writes to, and whether it was created for a new run.

    Training from the last checkpoint of a run resumes that run, and scoring and sampling write into the run of their
    checkpoint. Otherwise a new run begins.
    """
    if RUN in os.environ and is_child():
        return Path(os.environ[RUN]), False
    folder = output_folder(checkpoint, root) if checkpoint else None
    is_new = checkpoint is None or folder is None or (command == "fit" and checkpoint.name not in (LAST, PREVIOUS))
    if folder is None or is_new:
        # If another program (torchrun) started all processes, the first creates the folder; only it writes.
        folder = new_run(root, Path(ROOT)) if is_first() else root / "of another process"
    elif command != "fit":
        folder.mkdir(parents=True, exist_ok=True)  # of a shipped model
        folder = _writable(check_contained(folder))
    else:
        check_contained(folder)
    os.environ[RUN] = str(folder)
    return folder, is_new and is_first()


def is_first() -> bool:
    """Return whether this is process 0: Lightning sets it from what launchers put in the environment."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _writable(run: Path) -> Path:
    """Return the folder of a run if it is writable, else one in the current folder with the run's name."""
    try:
        with tempfile.TemporaryFile(dir=run):
            return run
    except OSError as error:
        other = Path.cwd() / f"{run.parent.name}_{run.name}"
        other.mkdir(exist_ok=True)
        rank_zero_info(f"{short(run)} can't be written to ({error.strerror}): results go to {short(other)}")
        return other


def is_child() -> bool:
    """Return whether this process was started by another process of the same run (DDP)."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0


class Configuration(pl.Callback):
    """Writes all settings (`CLI.settings`) into the folder of the run, and once to loggers of the user's own.

    A restarted SLURM job finds its run by `args`, the arguments of the command.
    """

    def __init__(self, settings: dict[str, Any], args: list[str], loggers: Sequence[Logger]) -> None:
        self.settings = settings
        self.args = args
        self.loggers = loggers
        self._unwritten = False  # of a resumed run

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `config.yaml` of a new run."""
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        slurm.record_job(folder, self.args)
        self._unwritten = (folder / "config.yaml").exists()
        if not self._unwritten:  # MLflow rejects a parameter whose value changes, as those of a resumed run may
            for logger in self.loggers:
                logger.log_hyperparams(flat(self.settings))
            self._write(folder / "config.yaml", self.settings)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write `config_resumed_N.yaml` of a resumed run, once its settings have trained a batch.

        Settings with which resuming fails would otherwise be those of the next command, too.
        """
        if self._unwritten:
            folder = Path(trainer.default_root_dir)
            paths = (folder / f"config_resumed_{attempt}.yaml" for attempt in count(1))
            # Without the run's own checkpoint, so that this file as `--config` of a new run does not resume this one.
            self._write(next(path for path in paths if not path.exists()), {**self.settings, "ckpt_path": None})
            self._unwritten = False

    @staticmethod
    def _write(path: Path, settings: dict[str, Any]) -> None:
        with whole(path) as part:
            part.write_text(marked(dump_yaml(settings)), encoding="utf-8", newline="\n")
