"""The options of `lit-effattn generate`: one dataclass a task, whose fields are the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lit_effattn.generation.beam import LENGTH_PENALTY, LengthNorm, check_beam
from lit_effattn.generation.sampling import Sampling
from lit_effattn.hparams import parameters


@dataclass(frozen=True, kw_only=True)
class DrawnOptions(Sampling):
    """Options of the tasks that draw samples.

    Args:
        n: How many samples. Default: 16 images, 1 text, 1 target, 5 tokens of `fill`.
        seed: Equal seeds draw equal samples. Default: 0.
        temperature: Below 1 draws likelier samples, 0 the likeliest. Default: 1, as the model was trained.
        top_k: Draw among the k likeliest levels or tokens only.
        top_p: Draw among the likeliest whose probabilities add up to p.
        compile: Whether each token is drawn by one compiled program, 2 to 14 times as fast for few rows on a CPU.
            Compiling takes about 20 s for each architecture and `n`; the program is kept for later calls.
        n_tokens: Text: tokens to draw. Default: 500. Images: dimensions to draw. Default: those that are left.
        state: Go on from this file, which `save_state` wrote with the same checkpoint. Text and images: without a
            prompt, and with the same options, the samples are those of a single longer call. Targets: of the source
            that the file holds, which is not encoded again.
        save_state: A file to write, from which a later call goes on. Images need `n_tokens`. Targets: it holds the
            encoded source.

    Raises:
        ValueError: If an option is out of range, or two contradict each other.
    """

    n: int | None = None
    n_tokens: int | None = None
    state: str | None = None
    save_state: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check_number(self.n)
        if self.n_tokens is not None and self.n_tokens < 1:
            raise ValueError(f"--n_tokens {self.n_tokens} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DrawnOptions):
    """Options of images.

    Args:
        complete: Images: erase this fraction of test images, from the bottom, and let the model complete them.
    """

    complete: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check_alone("state", self, "complete", because="a state has its own images; leave one out")


@dataclass(frozen=True, kw_only=True)
class TextOptions(DrawnOptions):
    """Options of text.

    Args:
        prompt: Text: how it begins.
        prompt_file: Text: a file with its beginning.
        beam: Text and targets: search for the likeliest ones with this many hypotheses; `n` of them are written.
            The search draws nothing, so `temperature`, `top_k`, `top_p` and `seed` do not go with it. 1 is greedy.
            A text ends at `n_tokens`; of words, at a line end before. Targets are always searched for; the default
            is then the model's.
        length_penalty: Targets, and text with `beam`: they are ranked by log p / ((5 + tokens) / 6) **
            length_penalty. 0 ranks by log p, more prefers longer ones. Default: 0.6, or the model's.
        length_norm: gnmt: as `length_penalty` says. average: by log p / tokens ** length_penalty, as fairseq and
            transformers. Default: gnmt, or the model's.
        prompts_file: Text: a file of prompts, one a line. If its name ends in .jsonl, a line is a JSON string, or
            an object with prompt and n_tokens. The samples, `n` of each, are written to samples.jsonl.
        batch_size: Text: samples of `prompts_file` that are drawn at once. Default: 32.
    """

    prompt: str | None = None
    prompt_file: str | None = None
    beam: int | None = None
    length_penalty: float | None = None
    length_norm: LengthNorm | None = None
    prompts_file: str | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check_alone("prompt", self, "prompt_file")
        _check_alone("prompts_file", self, "prompt", "prompt_file", "beam", "state", "save_state")
        if self.prompts_file is None and self.batch_size is not None:
            raise ValueError(f"--batch_size {self.batch_size} is an option of --prompts_file; give it, too")
        if self.beam is None:
            for name in ("length_penalty", "length_norm"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"--{name} {value} is an option of beam search; give --beam, too")
            return
        _check_alone("beam", self, "state", "save_state", because="a search has several texts; leave one out")
        for drawing in ("temperature", "top_k", "top_p", "seed"):
            if (value := getattr(self, drawing)) != getattr(Sampling, drawing):
                both = f"--beam {self.beam} and --{drawing} {value} were both given"
                raise ValueError(f"{both}; a search draws nothing; give only one")
        _check_beam(self.n, self.beam, self.length_penalty)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Options of targets, which are searched for.

    Args:
        source: The text to write a target for.
        n: How many targets. Default: 1.
        beam: See `TextOptions`.
        length_penalty: See `TextOptions`.
        length_norm: See `TextOptions`.
        state: See `DrawnOptions`.
        save_state: See `DrawnOptions`.

    Raises:
        ValueError: If an option is out of range, or not exactly one of `source` and `state` is given.
    """

    source: str | None = None
    n: int | None = None
    beam: int | None = None
    length_penalty: float | None = None
    length_norm: LengthNorm | None = None
    state: str | None = None
    save_state: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _check_number(self.n)
        if self.source is None and self.state is None:
            raise ValueError("--source is missing: give the text to write a target for, or --state of a source")
        _check_alone("source", self, "state", because="a state has its own source; leave one out")
        if self.beam is not None:
            _check_beam(self.n, self.beam, self.length_penalty)


@dataclass(frozen=True, kw_only=True)
class FillOptions:
    """Options of masked language models.

    Args:
        fill: Masked language models: a text with `[MASK]` in place of each token to predict.
        n: How many tokens for each. Default: 5.

    Raises:
        ValueError: If there is no text, or `n` is not positive.
    """

    fill: str | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _check_number(self.n)
        if self.fill is None:
            raise ValueError("--fill is missing: give a text with [MASK]")


def flags() -> dict[str, Any]:
    """Return the options of all tasks by name, with their annotations and texts."""
    kinds = (FillOptions, TargetOptions, TextOptions, ImageOptions)
    return {name: option for kind in kinds for name, option in parameters(kind).items()}


def made(kind: type | None, task: str, given: Mapping[str, Any]) -> Any:
    """Return the options of a task.

    Args:
        kind: The class of its options; None: it can't generate.
        task: Its name.
        given: The options by name. Those that are None are not given.

    Raises:
        ValueError: If it has no such option, or one is out of range.
    """
    if kind is None:
        raise ValueError(f"{task} draws no samples; use lit-effattn predict, which writes its output for each item")
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in fields(kind)}
    for name, value in given.items():
        if name not in known and value is not False:  # --compile false
            raise ValueError(f"--{name} {value}: {task} has no such option")
    return kind(**{name: value for name, value in given.items() if name in known})


def _check_number(n: int | None) -> None:
    if n is not None and n < 1:
        raise ValueError(f"--n {n}: draw at least one sample")


def _check_alone(name: str, options: Any, *others: str, because: str = "give only one") -> None:
    """Reject options that do not go with another."""
    for other in others:
        if getattr(options, name) is not None and getattr(options, other) is not None:
            raise ValueError(f"--{name} and --{other} were both given: {because}")


def _check_beam(n: int | None, beam: int, length_penalty: float | None) -> None:
    if n is not None and n > beam >= 1:
        raise ValueError(f"--n {n}: a search with --beam {beam} finds {beam} at most; give --beam {n} or more")
    check_beam(beam, 1, LENGTH_PENALTY if length_penalty is None else length_penalty)
