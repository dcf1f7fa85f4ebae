"""Writing the configuration of a run into its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.own_runs import marked
from lit_effattn.hparams import flat
from lit_effattn.settings.yaml_text import dump_yaml


class Configuration(pl.Callback):
    """Writes all settings into the folder of the run, and once to loggers of the user's own.

    Args:
        settings: The result of `CLI.settings`.
        args: The arguments of the command, by which a restarted SLURM job finds its run.
        loggers: The loggers that get the settings when the run begins.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        args: list[str],
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.settings = settings
        self.args = args
        self.loggers = loggers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `config.yaml`, or `config_resumed_N.yaml` in a resumed run."""
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        slurm.record_job(folder, self.args)
        path, attempt = folder / "config.yaml", 0
        if not path.exists():  # MLflow rejects a parameter whose value changes, as those of a resumed run may
            for logger in self.loggers:
                logger.log_hyperparams(flat(self.settings))
        while path.exists():
            attempt += 1
            path = folder / f"config_resumed_{attempt}.yaml"
        path.write_text(marked(dump_yaml(self.settings)), encoding="utf-8", newline="\n")
