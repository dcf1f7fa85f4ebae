"""Lightning's Trainer with a method that draws samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_effattn.checkpoints import read_checkpoint
from lit_effattn.generation import check_sampling
from lit_effattn.runs import new_folder


class Trainer(pl.Trainer):
    """See `lightning.pytorch.Trainer`."""

    def generate(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        n: int | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        compile: bool = False,
        complete: float | None = None,
        prompt: str | None = None,
        prompt_file: str | None = None,
        n_tokens: int | None = None,
        output: str | None = None,
    ) -> str:
        """Draw samples from a trained model; its configuration is found in the checkpoint.

        Of images: writes `samples.png`, a grid, and `samples.npy`, the levels as integers (n, height, width,
        channels). With `complete`, `completed.png` has the erased, completed and original images in three rows.

        Of text: shows each sample, a single one while it is drawn, and writes them, prompt included, to `samples.txt`.

        Args:
            model: The model.
            datamodule: Where images to complete come from.
            ckpt_path: The checkpoint: its path, or `last` or `best` of the newest run.
            n: How many samples. Default: 16 images, 1 text.
            seed: Equal seeds draw equal samples.
            temperature: Below 1 draws likelier samples, 0 the likeliest, 1 as the model was trained.
            top_k: Draw among the k likeliest levels or tokens only.
            top_p: Draw among the likeliest whose probabilities add up to p.
            compile: Draw each token by one compiled program: faster, after some seconds to a minute of compiling.
            complete: Images: erase this fraction of test images, from the bottom, and let the model complete them.
            prompt: Text: how it begins.
            prompt_file: Text: a file with its beginning.
            n_tokens: Text: tokens to draw. Default: 500.
            output: Folder to write to, which must not exist or be empty. Default: a new one in the run's `generated`.

        Returns:
            What to say of what was written, a line each.
        """
        if n is not None and n < 1:
            raise ValueError(f"--n {n}: draw at least one sample")
        check_sampling(temperature, top_k, top_p)
        _refuse_used(output)
        if not callable(getattr(model, "write_samples", None)):
            raise ValueError(f"{type(model).__name__} can't generate: it has no `write_samples`")
        task: Any = model
        options = {"complete": complete, "prompt": prompt, "prompt_file": prompt_file, "n_tokens": n_tokens}
        given = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() - inspect.signature(task.write_samples).parameters.keys():
            raise ValueError(f"--{name} {given[name]}: {type(model).__name__} has no such option")
        if ckpt_path is not None:
            checkpoint = read_checkpoint(ckpt_path)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        task.to(self.strategy.root_device).eval()
        said: str = task.write_samples(
            partial(_output_folder, output, Path(self.default_root_dir)),
            datamodule=datamodule,
            n=n,
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "compile": compile},
            progress=_track,
            **given,
        )
        return said


def _track(steps: Iterable[int]) -> Iterable[int]:
    from rich.progress import track

    assert isinstance(steps, Sequence)
    return track(steps, description="Drawing", transient=True)


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
