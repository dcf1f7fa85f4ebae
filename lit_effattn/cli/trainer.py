"""Lightning's Trainer, able to generate too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_effattn.checkpoints import read_checkpoint
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
    ) -> Path:
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
        """
        if n is not None and n < 1:
            raise ValueError(f"--n {n}: draw at least one sample")
        check_sampling(temperature, top_k, top_p)
        _refuse_used(output)
        if not callable(getattr(model, "sample", None)):
            raise ValueError(f"{type(model).__name__} can't generate: it has no `sample`")
        task: Any = model
        images = callable(getattr(model, "to_images", None))
        for name, value, wanted in (
            ("complete", complete, images),
            ("prompt", prompt, not images),
            ("prompt_file", prompt_file, not images),
            ("n_tokens", n_tokens, not images),
        ):
            if value is not None and not wanted:
                raise ValueError(f"--{name} {value}: {type(model).__name__} draws {'images' if images else 'text'}")
        if ckpt_path is not None:
            checkpoint = read_checkpoint(ckpt_path)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        task.to(self.strategy.root_device).eval()
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "compile": compile}
        if images:
            return self._draw_images(task, datamodule, 16 if n is None else n, complete, output, how)
        begin = _prompt(prompt, prompt_file)
        return self._draw_text(task, begin, n or 1, 500 if n_tokens is None else n_tokens, output, how)

    def _draw_text(
        self, task: Any, prompt: str, n: int, n_tokens: int, output: str | None, how: dict[str, Any]
    ) -> Path:
        if n_tokens < 1:
            raise ValueError(f"--n_tokens {n_tokens}: draw at least one")
        tokenizer = task.text
        _check_known(tokenizer, prompt)
        tokens = torch.tensor([tokenizer.start, *tokenizer.encode(prompt).tolist()]).expand(n, -1)
        shown = Decoded(tokenizer) if n == 1 else None
        if shown is not None:
            print(prompt, end="", flush=True)
        drawn = task.sample(tokens, n_tokens, progress=_track if shown is None else iter, on_tokens=shown, **how).cpu()
        if shown is not None:
            shown.finish()
        texts = [prompt + tokenizer.decode(row.numpy()) for row in drawn]
        if shown is None:
            for i, text in enumerate(texts):
                print(f"--- {i}\n{text}")
        path = _output_folder(output, Path(self.default_root_dir)) / "samples.txt"
        path.write_text("\n\n".join(f"--- {i}\n{text}" for i, text in enumerate(texts)), encoding="utf-8")
        return path

    def _draw_images(
        self,
        task: Any,
        datamodule: pl.LightningDataModule | None,
        n: int,
        complete: float | None,
        output: str | None,
        how: dict[str, Any],
    ) -> Path:
        originals = None if complete is None else _test_images(datamodule, n, complete)
        kept = None if originals is None else originals[:, : _kept(complete or 0.0, task.image_shape)]

        levels = task.sample(n, given=kept, progress=_track, **how).cpu()
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


class Decoded:
    """Shows tokens as text while they come: as much of it as no further token can change.

    Args:
        tokenizer: Turns tokens into text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def __call__(self, tokens: Tensor) -> None:
        """Show what (1,) more tokens add."""
        self._tokens.append(int(tokens))
        text = self._text()
        if not text.endswith("\ufffd"):  # the first bytes of a character
            self._show(text)

    def finish(self) -> None:
        """Show the rest."""
        self._show(self._text())
        print(flush=True)

    def _text(self) -> str:
        text: str = self._tokenizer.decode(np.array(self._tokens))
        return text

    def _show(self, text: str) -> None:
        print(text[self._shown :], end="", flush=True)
        self._shown = len(text)


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt_file is None:
        return prompt or ""
    if prompt is not None:
        raise ValueError("--prompt and --prompt_file were both given; a text has one beginning")
    try:
        return Path(prompt_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file {prompt_file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _check_known(tokenizer: Any, prompt: str) -> None:
    """Refuse characters that the model never saw, whose embedding is noise; a word that it did not is `<unk>`."""
    unknown = tokenizer.unknown(prompt)
    if not unknown:
        return
    shown = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    if tokenizer.unit == "character":
        raise ValueError(f"the prompt has {shown}, of which the model's training text had none; leave it out")
    rank_zero_warn(f"the prompt has {shown}, read as <unk>: not in the model's vocabulary")


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
