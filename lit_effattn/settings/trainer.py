"""Lightning's Trainer with checked checkpoints and a method that draws samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_effattn.checkpoints.restoring import CheckpointConnector
from lit_effattn.checkpoints.runs import named_or_new
from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.generation.beam import LENGTH_PENALTY, LengthNorm, check_beam
from lit_effattn.generation.sampling import Sampling


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
        n: int | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        compile: bool = False,
        complete: float | None = None,
        prompt: str | None = None,
        prompt_file: str | None = None,
        n_tokens: int | None = None,
        beam: int | None = None,
        length_penalty: float | None = None,
        length_norm: LengthNorm | None = None,
        state: str | None = None,
        save_state: str | None = None,
        prompts_file: str | None = None,
        batch_size: int | None = None,
        source: str | None = None,
        fill: str | None = None,
        output: str | None = None,
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
            n: How many samples. Default: 16 images, 1 text, 1 target, 5 tokens of `fill`.
            seed: Equal seeds draw equal samples. Default: 0.
            temperature: Below 1 draws likelier samples, 0 the likeliest. Default: 1, as the model was trained.
            top_k: Draw among the k likeliest levels or tokens only.
            top_p: Draw among the likeliest whose probabilities add up to p.
            compile: Whether each token is drawn by one compiled program, 2 to 14 times as fast for few rows on a CPU.
                Compiling takes about 20 s for each architecture and `n`; the program is kept for later calls.
            complete: Images: erase this fraction of test images, from the bottom, and let the model complete them.
            prompt: Text: how it begins.
            prompt_file: Text: a file with its beginning.
            n_tokens: Text: tokens to draw. Default: 500. Images: dimensions to draw. Default: those that are left.
            beam: Text and targets: search for the likeliest ones with this many hypotheses; `n` of them are written.
                The search draws nothing, so `temperature`, `top_k`, `top_p` and `seed` do not go with it. 1 is greedy.
                A text ends at `n_tokens`; of words, at a line end before. Targets are always searched for; the default
                is then the model's.
            length_penalty: Targets, and text with `beam`: they are ranked by log p / ((5 + tokens) / 6) **
                length_penalty. 0 ranks by log p, more prefers longer ones. Default: 0.6, or the model's.
            length_norm: gnmt: as `length_penalty` says. average: by log p / tokens ** length_penalty, as fairseq and
                transformers. Default: gnmt, or the model's.
            state: Go on from this file, which `save_state` wrote with the same checkpoint. Text and images: without a
                prompt, and with the same options, the samples are those of a single longer call. Targets: of the source
                that the file holds, which is not encoded again.
            save_state: A file to write, from which a later call goes on. Images need `n_tokens`. Targets: it holds the
                encoded source.
            prompts_file: Text: a file of prompts, one a line. If its name ends in .jsonl, a line is a JSON string, or
                an object with prompt and n_tokens. The samples, `n` of each, are written to samples.jsonl.
            batch_size: Text: samples of `prompts_file` that are drawn at once. Default: 32.
            source: The text to write a target for.
            fill: Masked language models: a text with `[MASK]` in place of each token to predict.
            output: Folder to write to, which must not exist or be empty. Default: a new one in the run's `generated`.

        Returns:
            Messages, one per line.
        """
        if n is not None and n < 1:
            raise ValueError(f"--n {n}: draw at least one sample")
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "compile": compile or None}
        drawing: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
        sampling = Sampling(**drawing)
        not_searching = {name: value for name, value in drawing.items() if name != "compile"}
        if not callable(getattr(model, "write_samples", None)):
            name = type(model).__name__
            raise ValueError(f"{name} draws no samples; use lit-effattn predict, which writes its output for each item")
        task: Any = model
        known = inspect.signature(task.write_samples).parameters
        _check_search(beam, length_penalty, length_norm, n, not_searching, always="source" in known)
        folder = None if output is None else Path(output)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"--output {output} exists and is not an empty folder; name another")
        options = {
            **{"complete": complete, "prompt": prompt, "prompt_file": prompt_file, "n_tokens": n_tokens},
            **{"beam": beam, "length_penalty": length_penalty, "length_norm": length_norm},
            **{"source": source, "fill": fill, "state": state, "save_state": save_state},
            **{"prompts_file": prompts_file, "batch_size": batch_size},
        }
        given = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() - known.keys():
            raise ValueError(f"--{name} {given[name]}: {type(model).__name__} has no such option")
        for name, value in drawing.items() if "sampling" not in known else ():
            raise ValueError(f"--{name} {value}: {type(model).__name__} searches and draws nothing; leave it out")
        if "fill" in known and fill is None:
            raise ValueError(f"--fill is missing: {type(model).__name__} needs a text with [MASK]")
        if "source" in known and source is None and state is None:
            raise ValueError(
                f"--source is missing: {type(model).__name__} needs it to generate, or --state of a source"
            )
        if ckpt_path is not None:
            checkpoint = self.strategy.checkpoint_io.load_checkpoint(ckpt_path, weights_only=True)
            task.on_load_checkpoint(checkpoint)
            task.load_state_dict(checkpoint["state_dict"])
        task.to(self.strategy.root_device).eval()
        messages: str = task.write_samples(
            partial(named_or_new, folder, Path(self.default_root_dir) / "generated", "samples"),
            datamodule=datamodule,
            n=n,
            progress=_track,
            **({"sampling": sampling} if "sampling" in known else {}),
            **given,
        )
        return messages


def _check_search(
    beam: int | None,
    length_penalty: float | None,
    length_norm: LengthNorm | None,
    n: int | None,
    drawing: dict[str, Any],
    *,
    always: bool,
) -> None:
    """Reject options of beam search that are out of range, given without `beam`, or beside options of sampling."""
    if beam is None:
        for name, value in (("length_penalty", length_penalty), ("length_norm", length_norm)):
            if value is not None and not always:
                raise ValueError(f"--{name} {value} is an option of beam search; give --beam, too")
        return
    for name, value in drawing.items():
        raise ValueError(f"--beam {beam} and --{name} {value} were both given; a search draws nothing; give only one")
    if n is not None and n > beam >= 1:
        raise ValueError(f"--n {n}: a search with --beam {beam} finds {beam} at most; give --beam {n} or more")
    check_beam(beam, 1, LENGTH_PENALTY if length_penalty is None else length_penalty)


def _track(steps: Iterable[int]) -> Iterable[int]:
    assert isinstance(steps, Sequence)
    with progress_bar() as bar:  # on stderr: samples go to stdout
        yield from bar.track(steps, description="Drawing")
