"""Files of prompts, and of the samples that continue them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lit_effattn.datamodules.common.files import regular


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
        value = json.loads(line)
    except (RecursionError, ValueError) as error:
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


def write_continued(prompts: Sequence[Prompt], samples: Sequence[Sequence[str]], path: Path) -> None:
    """Write a line of JSON for each prompt: the prompt, and the texts that continue it."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, texts in zip(prompts, samples, strict=True):
            print(json.dumps({"prompt": prompt.text, "samples": texts}, ensure_ascii=False), file=file)
