"""Lightning's Trainer, able to generate too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from callbacks.checkpoints import read_checkpoint
from lit_effattn.generation import check_sampling
from lit_effattn.pictures import grid, labelled_rows, save_png
from lit_effattn.runs import new_folder


class Trainer(pl.Trainer):
    """See `lightning.pytorch.Trainer`."""

    def generate(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        n: int = 16,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        complete: float | None = None,
        output: str | None = None,
    ) -> Path:
        """Draw samples from a trained model; its configuration is found in the checkpoint.

        Writes `samples.png`, a grid, and `samples.npy`, the levels as integers (n, height, width, channels). With
        `complete`, `completed.png` has the erased, completed and original images in three rows.

        Args:
            model: The model.
            datamodule: Where images to complete come from.
            ckpt_path: The checkpoint: its path, or `last` or `best` of the newest run.
            n: How many samples.
            seed: Equal seeds draw equal samples.
            temperature: Below 1 draws likelier samples, 0 the likeliest, 1 as the model was trained.
            top_k: Draw among the k likeliest levels only.
            top_p: Draw among the likeliest levels whose probabilities add up to p.
            complete: Erase this fraction of test images, from the bottom, and let the model complete them.
            output: Folder to write to, which must not exist or be empty. Default: a new one in the run's `generated`.
        """
        if n < 1:
            raise ValueError(f"--n {n}: draw at least one sample")
        check_sampling(temperature, top_k, top_p)
        _refuse_used(output)
        if not callable(getattr(model, "sample", None)):
            raise ValueError(f"{type(model).__name__} can't generate: it has no `sample`")
        task: Any = model
        if ckpt_path is not None:
            checkpoint = read_checkpoint(ckpt_path)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        device = self.strategy.root_device
        task.to(device).eval()
        originals = None if complete is None else _test_images(datamodule, n, complete)
        kept = None if originals is None else originals[:, : _kept(complete or 0.0, task.image_shape)]

        levels = task.sample(
            n,
            given=kept,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            progress=_track,
        ).cpu()
        folder = _output_folder(output, Path(self.default_root_dir))
        images = task.to_images(levels)
        np.save(folder / "samples.npy", levels.view(-1, *task.image_shape).to(torch.int16).numpy())
        if originals is None or kept is None:
            path = save_png(grid(images), folder / "samples.png")
        else:
            erased = task.to_images(originals).clone()
            hidden = torch.arange(originals.size(1)).view(task.image_shape).permute(2, 0, 1) >= kept.size(1)
            rows = {
                "given": erased.masked_fill(hidden, 128),
                "completed": images,
                "original": task.to_images(originals),
            }
            path = labelled_rows(rows, folder / "completed.png")
        return path


def _track(steps: Iterable[int]) -> Iterable[int]:
    from rich.progress import track

    assert isinstance(steps, Sequence)
    return track(steps, description="Drawing", transient=True)


def _test_images(datamodule: pl.LightningDataModule | None, n: int, complete: float) -> Tensor:
    """Return the first `n` test images, (n, H·W·C) levels."""
    if not 0 < complete < 1:
        raise ValueError(f"--complete {complete}: the fraction to erase lies between 0 and 1, both excluded")
    if datamodule is None:
        raise ValueError("--complete needs data to take images from; name it with --data")
    datamodule.prepare_data()
    datamodule.setup("test")
    batches: list[Tensor] = []
    for batch in datamodule.test_dataloader():
        batches.append(batch)
        if sum(map(len, batches)) >= n:
            break
    images = torch.cat(batches)[:n]
    if len(images) < n:
        raise ValueError(f"--n {n}: there are only {len(images)} test images to complete")
    return images.long()


def _kept(complete: float, image_shape: tuple[int, int, int]) -> int:
    """Return how many dimensions stay, rounded to whole rows where the image has as many."""
    h, w, c = image_shape
    rows = round(h * (1 - complete))
    return rows * w * c if 0 < rows < h else max(0, min(h * w * c - 1, round(h * w * c * (1 - complete))))


def _refuse_used(output: str | None) -> None:
    folder = None if output is None else Path(output)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"--output {output} exists and is not an empty folder; name another")


def _output_folder(output: str | None, run: Path) -> Path:
    if output is None:
        return new_folder(run / "generated", "samples")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
