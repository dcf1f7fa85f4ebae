"""The samples of `lit-effattn generate`, on the screen and in files: texts, images, targets of a source, filled gaps.

The functions named `write_…` are the methods `write_samples` of tasks: see `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad

from lit_effattn.attention.positions import n_positions
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.tokens import IGNORE, PairBatch
from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, Tokenizer
from lit_effattn.drawing.images import grid, labelled_rows, save_png
from lit_effattn.generation.beam import LENGTH_PENALTY, Hypotheses
from lit_effattn.generation.sampling import Kept
from lit_effattn.tasks.kept_states import check_replaceable, load_state, save_state
from lit_effattn.tasks.options import DrawnOptions, FillOptions, ImageOptions, TargetOptions, TextOptions
from lit_effattn.tasks.predictions import write_lines, write_outputs

N_IMAGES, N_TOKENS = 16, 500
"""Default numbers of images, and of tokens of a text."""

Folder = Callable[[], Path]
"""Makes the folder of the samples."""

Progress = Callable[[Iterable[int]], Iterable[int]]
"""Wraps the iterable of steps, for a progress bar."""


# States


def _kept(
    task: Any, options: DrawnOptions | TargetOptions, rows: int | None
) -> tuple[Kept | None, Callable[[Kept], None] | None]:
    """Return the state in the file `state`, and what writes the file `save_state`. None: the option is not given.

    Raises:
        ValueError: If the state can't be read, or has not the given number of rows.
        FileExistsError: If `save_state` exists and is not a saved state.
    """
    kept = keep = None
    if options.save_state is not None:
        check_replaceable(Path(options.save_state))
        keep = partial(save_state, path=Path(options.save_state), task=task)
    if options.state is not None:
        with task.in_evaluation():
            kept = load_state(regular(Path(options.state)), task)
        if rows not in (None, len(kept.tokens)):
            raise ValueError(f"--n {rows}: {options.state} has {len(kept.tokens)} samples; leave --n out")
    return kept, keep


# Images


def write_images(
    task: Any, folder: Folder, options: ImageOptions, *, datamodule: Any = None, progress: Progress = iter
) -> str:
    """Draw images, or complete test images of `datamodule`, and write them: see `Task.write_samples`.

    Dimensions that are not drawn are grey, and −1 among the levels.
    """
    kept, keep = _kept(task, options, options.n)
    originals = None if options.complete is None else _test_images(datamodule, options.n, options.complete)
    given = None if originals is None else originals[:, : _n_given(options.complete or 0.0, task.image_shape)]
    begun = given if kept is None else kept.tokens
    left = task.n_dims - (0 if begun is None else begun.size(1))
    n_tokens = left if options.n_tokens is None else options.n_tokens
    if n_tokens > left:
        raise ValueError(f"--n_tokens {n_tokens} must be at most {left}, the dimensions left to draw")
    if keep is not None and n_tokens == left:
        raise ValueError(f"--save_state {options.save_state}: whole images can't go on; give --n_tokens below {left}")
    how: Any = {"kept": kept, "keep": keep, "sampling": options, "progress": progress}
    levels = task.sample(options.n or N_IMAGES, given=given, n_dims=n_tokens, **how).cpu()
    into, images = folder(), _partial_images(task, levels)
    levels = pad(levels, (0, task.n_dims - levels.size(1)), value=-1)
    np.save(into / "samples.npy", levels.view(-1, *task.image_shape).to(torch.int16).numpy())
    if originals is None or given is None:
        path = save_png(grid(images), into / "samples.png")
    else:
        rows = {"given": _partial_images(task, given), "completed": images, "original": task.to_images(originals)}
        path = labelled_rows(rows, into / "completed.png")
    return f"picture: {short(path)}\nlevels:  {short(into / 'samples.npy')}"


def _partial_images(task: Any, levels: Tensor) -> Tensor:
    """(n, P) levels -> (n, C, H, W) uint8, grey where there are none."""
    missing = torch.arange(task.n_dims).view(task.image_shape).permute(2, 0, 1) >= levels.size(1)
    return task.to_images(pad(levels, (0, task.n_dims - levels.size(1)))).masked_fill(missing, 128)


def _test_images(datamodule: Any, n: int | None, complete: float) -> Tensor:
    """Return the first `n` test images, (n, H·W·C) levels. None: at most `N_IMAGES`."""
    if not 0 < complete < 1:
        raise ValueError(f"--complete {complete}: the fraction to erase must be above 0 and below 1")
    if datamodule is None:
        raise ValueError("--complete needs data to take images from; name it with --data")
    datamodule.prepare_data()
    datamodule.setup("test")
    batches: list[Tensor] = []
    for batch in datamodule.test_dataloader():
        batches.append(batch)
        if sum(map(len, batches)) >= (n or N_IMAGES):
            break
    images = torch.cat(batches)[: n or N_IMAGES]
    if n is not None and len(images) < n:
        raise ValueError(f"--n {n}: there are only {len(images)} test images to complete")
    return images.long()


def _n_given(complete: float, image_shape: tuple[int, ...]) -> int:
    """Return the number of dimensions that are not erased, if possible whole rows."""
    h, w, c = image_shape
    rows = round(h * (1 - complete))
    return rows * w * c if 0 < rows < h else max(0, min(h * w * c - 1, round(h * w * c * (1 - complete))))


# Texts


def write_texts(
    task: Any, folder: Folder, options: TextOptions, *, datamodule: Any = None, progress: Progress = iter
) -> str:
    """Continue a text and write the samples: see `Task.write_samples`. A single sample is shown while it is drawn.

    With `beam`, the samples are the best continuations, each with its score. They end at the tokenizer's end token, if
    it has one, or after `n_tokens`.
    """
    if options.prompts_file is not None:
        return _continue_file(task, folder, options, progress)
    begin, tokenizer = _prompt(options), task.text
    check_known(tokenizer, begin)
    kept, keep = _kept(task, options, options.n)
    first = [tokenizer.start] if kept is None else []
    tokens = torch.tensor([[*first, *tokenizer.encode(begin).tolist()]], dtype=torch.long)
    n = (options.n or 1) if kept is None else len(kept.tokens)
    room = _room(task, tokens.shape[1], kept)
    if room is not None and room < 1:
        given, remedy = (
            ("the prompt", "shorten it") if kept is None else (f"--state {options.state}", "use an earlier state")
        )
        raise ValueError(
            f"{given} leaves no position to draw from: it needs {1 - room} more than the model's {_room(task, 1)}; "
            f"{remedy}, or use a model without learned positions"
        )
    asked = N_TOKENS if options.n_tokens is None else options.n_tokens
    n_tokens = asked if room is None else min(asked, room)
    if begin and not begin[-1].isspace():
        begin += tokenizer.separator
    shown = Shown(tokenizer, begin) if n == 1 and options.beam is None else None
    if options.beam is None:
        drawn = task.sample(
            tokens.expand(n, -1),
            n_tokens,
            kept=kept,
            keep=keep,
            sampling=options,
            progress=progress if shown is None else iter,
            on_tokens=shown,
        )
        numbered = [f"--- {i}\n{begin}{tokenizer.decode(row.numpy())}" for i, row in enumerate(drawn.cpu())]
    else:
        found = task.beam_search(
            tokens,
            n_tokens,
            beam=options.beam,
            end=tokenizer.end,
            length_penalty=LENGTH_PENALTY if options.length_penalty is None else options.length_penalty,
            length_norm=options.length_norm or "gnmt",
            n_best=n,
            compile=options.compile,
            progress=progress,
        )
        numbered = _with_scores(found, begin, tokenizer)
    if shown is not None:
        shown.finish()
    else:
        print(*map(printable, numbered), sep="\n")
    path = folder() / "samples.txt"
    path.write_text("\n\n".join(numbered), encoding="utf-8")
    if n_tokens == asked:
        return f"text: {short(path)}"
    remedy = f"draw at most {n_tokens} tokens (--n_tokens {n_tokens}), or use a model without learned positions"
    return f"{n_tokens} tokens of {asked}: the model has {_room(task, 1)} positions; {remedy}\ntext: {short(path)}"


class Shown:
    """Shows tokens as text while they are drawn, as far as later tokens can't change it.

    Args:
        tokenizer: Turns tokens into text.
        begin: Shown before the first token, when it is drawn: an error before that has a line of its own.
    """

    def __init__(self, tokenizer: Tokenizer, begin: str) -> None:
        self._tokenizer = tokenizer
        self._begin = begin
        self._tokens: list[int] = []
        self._shown = 0

    def __call__(self, tokens: Tensor) -> None:
        """Show the text of one more token, (1,)."""
        self._tokens.append(int(tokens))
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\ufffd"):  # an incomplete character
            self._show(text)

    def finish(self) -> None:
        """Show the rest."""
        self._show(self._tokenizer.decode(self._tokens))
        print(flush=True)

    def _show(self, text: str) -> None:
        print(printable(self._begin + text[self._shown :]), end="", flush=True)
        self._begin, self._shown = "", len(text)


def _with_scores(found: Hypotheses, begin: str, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of a single prompt's hypotheses, each under its number, score and log-probability."""
    rows, lengths, scores, log_probs = (t[0].cpu() for t in found)
    return [
        f"--- {i}, score {score:.4f}, log p {log_p:.4f}\n{begin}{tokenizer.decode(row[:length].numpy())}"
        for i, (row, length, score, log_p) in enumerate(zip(rows, lengths, scores, log_probs, strict=True))
        if length > 0
    ]


def _prompt(options: TextOptions) -> str:
    path = options.prompt_file
    if path is None:
        return options.prompt or ""
    try:
        return regular(Path(path)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file {path} is not UTF-8: {error.reason} at byte {error.start}") from error


def check_known(tokenizer: Tokenizer, text: str) -> None:
    """Reject characters that were not in the training text, and warn of words and letters that are read as another.

    Raises:
        ValueError: If a token is a character, and the text has an unknown one: its embedding is not trained.
    """
    unknown = tokenizer.unknown(text)
    if not unknown or isinstance(tokenizer, NumberTokenizer):  # it has no <unk>, and encoding raises
        return
    shown = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    if tokenizer.unit == "character":
        raise ValueError(f"the text has {shown}, which the model's training text does not contain; leave it out")
    rank_zero_warn(f"the text has {shown}, read as {tokenizer.replaces[1]}: not in the model's vocabulary")


def _room(task: Any, n: int, kept: Kept | None = None) -> int | None:
    """Return how many tokens the model's positions leave after `n` tokens that go on from `kept`; None: any number.

    The last token drawn is not read.
    """
    limit = n_positions(task.backbone)
    if limit is None:
        return None
    if kept is not None:
        n += int(kept.state.length.max()) + kept.tokens.shape[1]
    return limit + 1 - n


# Files of prompts


class Prompt(NamedTuple):
    """A prompt of a file.

    Attributes:
        text: The beginning of the samples.
        n_tokens: Number of tokens to draw. None: the file does not name it.
    """

    text: str
    n_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    r"""Read the prompts of a file, one a line; empty lines are skipped.

    In a file that ends in .jsonl a line is a JSON string, in which a line end is written as \n, or an object
    {"prompt": "...", "n_tokens": 100}, in which n_tokens may be left out.

    Raises:
        ValueError: If the file is not UTF-8, a line is something else, or there is no prompt.
    """
    try:
        lines = regular(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    is_json = path.suffix.lower() == ".jsonl"
    prompts = [_parsed(s, f"{path}:{i}") if is_json else Prompt(s) for i, s in enumerate(lines, 1) if s.strip()]
    if not prompts:
        raise ValueError(f"{path} has no prompts; write one a line")
    return prompts


def _parsed(line: str, place: str) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}; a line of .jsonl is a string or an object, as JSON") from error
    entry = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not {"prompt"} <= entry.keys() <= {"prompt", "n_tokens"}:
        raise ValueError(f'{place}: {line[:80]} is neither a string nor {{"prompt": "...", "n_tokens": 100}}')
    text, n_tokens = entry["prompt"], entry.get("n_tokens")
    if not isinstance(text, str) or (n_tokens is not None and (type(n_tokens) is not int or n_tokens < 1)):
        raise ValueError(f"{place}: {line[:80]}: prompt must be a string, and n_tokens an integer of at least 1")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{place}: {line[:80]}: half of a surrogate pair is not a character; write both halves")
    return Prompt(text, n_tokens)


def _continue_file(task: Any, folder: Folder, options: TextOptions, progress: Progress) -> str:
    """Continue the prompts of a file, write the samples, and return the message.

    Raises:
        ValueError: If the model has too few positions for a prompt or its tokens. The samples are written before.
    """
    prompts, tokenizer = read_prompts(Path(options.prompts_file or "")), task.text
    for prompt in prompts:
        check_known(tokenizer, prompt.text)
    tokens = [torch.tensor([tokenizer.start, *tokenizer.encode(p.text).tolist()]) for p in prompts]
    asked = [p.n_tokens or options.n_tokens or N_TOKENS for p in prompts]
    rooms = [_room(task, len(prompt)) for prompt in tokens]
    limits = [n if room is None else max(0, min(n, room)) for n, room in zip(asked, rooms, strict=True)]
    how: Any = {"n": options.n or 1, "sampling": options, "progress": progress}
    how["batch_size"] = 32 if options.batch_size is None else options.batch_size
    fits = [i for i, limit in enumerate(limits) if limit]
    drawn = task.sample_each([tokens[i] for i in fits], [limits[i] for i in fits], **how) if fits else []
    samples: list[list[str]] = [[] for _ in prompts]
    for i, rows in zip(fits, drawn, strict=True):
        samples[i] = [tokenizer.decode(row.numpy()) for row in rows.cpu()]
    entries = ({"prompt": p.text, "samples": texts} for p, texts in zip(prompts, samples, strict=True))
    written = write_lines(folder() / "samples.jsonl", entries)
    cut = [prompts[i].text for i in range(len(prompts)) if limits[i] < asked[i]]
    if cut:
        raise ValueError(
            f"{len(cut)} of {len(prompts)} prompts have fewer tokens than asked for, since the model has "
            f"{_room(task, 1)} positions: {', '.join(repr(text[:30]) for text in cut[:3])}; give fewer tokens "
            f"or shorter prompts. {short(written)} has the rest"
        )
    return f"{sum(map(len, samples))} texts: {short(written)}"


# Targets and gaps


@torch.no_grad()
def write_targets(
    task: Any, folder: Folder, options: TargetOptions, *, datamodule: Any = None, progress: Any = iter
) -> str:
    """Write the `n` best targets of a source, with their scores: see `Task.write_samples`."""
    kept, keep = _kept(task, options, None)
    if kept is None:
        tokens = task.encode(options.source)[None].to(task.device)
        with task.in_evaluation():
            kept = Kept(task.remember(tokens, max_len=tokens.size(1)), tokens, 0)
    if keep is not None:
        keep(kept)
    tokens = kept.tokens
    border = torch.full_like(tokens[:, :1], task.border)
    count, unscored = torch.ones_like(border[0]), torch.full_like(border, IGNORE)
    batch = PairBatch(tokens, count * tokens.size(1), border, unscored, count, [], [[]])
    task.check_batch(batch)
    source = task.source_text.decode(tokens[0, :-1].cpu().numpy()) if options.source is None else options.source
    n = options.n or 1
    (translation,) = task.translations(
        batch._replace(sources=[source]),
        drawn=1,
        state=kept.state,
        beam=max(n, task.beam) if options.beam is None else options.beam,
        length_penalty=options.length_penalty,
        length_norm=options.length_norm,
        n_best=n,
    )
    for output in translation.entry["outputs"]:
        print(f"{output['score']:.4f}  {printable(output['text'])}")
    return write_outputs([translation], folder())


def write_filled(
    task: Any, folder: Folder, options: FillOptions, *, datamodule: Any = None, progress: Any = iter
) -> str:
    """Write the likeliest tokens at each `[MASK]` of `fill`: see `Task.write_samples`."""
    fill = options.fill or ""
    lines = [
        f"[MASK] {i}: " + ", ".join(f"{token!r} {p:.4f}" for token, p in likeliest)
        for i, likeliest in enumerate(task.fill(fill, options.n or 5), 1)
    ]
    print(*map(printable, lines), sep="\n")
    path = folder() / "samples.txt"
    path.write_text("\n".join([fill, *lines, ""]), encoding="utf-8")
    return f"tokens: {short(path)}"
