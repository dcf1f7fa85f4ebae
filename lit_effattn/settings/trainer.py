"""Lightning's Trainer with checked checkpoints and a method that draws samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_effattn.checkpoints.restoring import CheckpointConnector
from lit_effattn.checkpoints.runs import named_or_new
from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.tasks.options import made


class Trainer(pl.Trainer):
    """See `lightning.pytorch.Trainer`."""

    @property  # type: ignore[override]  # an attribute of the base class
    def _checkpoint_connector(self) -> CheckpointConnector:
        return self._connector

    @_checkpoint_connector.setter
    def _checkpoint_connector(self, connector: Any) -> None:
        """Replace the connector that Lightning's constructor sets with one that checks."""
        self._connector = CheckpointConnector(self)

    def generate(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        output: str | None = None,
        **options: Any,
    ) -> str:
        """Draw samples from a trained model, or write a target for a source. Its configuration is in the checkpoint.

        Of images: writes `samples.png`, a grid, and `samples.npy`, the levels as integers (n, height, width,
        channels). With `complete`, `completed.png` has the erased, completed and original images in three rows.

        Of text: shows each sample, a single one while it is drawn, and writes them, prompt included, to `samples.txt`.
        With `beam` it does not draw but searches for the likeliest texts, and shows and writes their scores as well.

        Of a masked language model: shows the `n` likeliest tokens at each `[MASK]` of `fill`, with their probabilities,
        and writes them to `samples.txt`.

        Of a sequence-to-sequence model: shows the `n` best targets of `source` with their scores, and writes them to
        `translations.jsonl`, with a picture of the source tokens that each output looked at.

        Args:
            model: The model.
            datamodule: The images to complete.
            ckpt_path: The checkpoint: its path, or `last` or `best` of the newest run.
            output: Folder to write to, which must not exist or be empty. Default: a new one in the run's `generated`.
            options: Fields of the model's `generation`: see `lit_effattn.tasks.options`. None: not given.

        Returns:
            Messages, one per line.
        """
        task: Any = model
        chosen = made(getattr(task, "generation", None), type(task).__name__, options)
        folder = None if output is None else Path(output)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"--output {output} exists and is not an empty folder; name another")
        if ckpt_path is not None:
            checkpoint = self.strategy.checkpoint_io.load_checkpoint(ckpt_path, weights_only=True)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        task.to(self.strategy.root_device).eval()
        new = partial(named_or_new, folder, Path(self.default_root_dir) / "generated", "samples")
        messages: str = task.write_samples(new, chosen, datamodule=datamodule, progress=_track)
        return messages


def _track(steps: Iterable[int]) -> Iterable[int]:
    assert isinstance(steps, Sequence)
    with progress_bar() as bar:  # on stderr: samples go to stdout
        yield from bar.track(steps, description="Drawing")
