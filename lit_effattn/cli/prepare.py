"""`lit-effattn data prepare`: tokenizing a text larger than memory into files, which training maps."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.text.prepare import prepare as make
from lit_effattn.datamodules.text.tokenizers import KINDS


def prepare(args: list[str]) -> None:
    """Tokenize a text, or continue after an interruption.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no input.
        ValueError: If the folder has other settings or another input, or an argument is invalid.
    """
    given = vars(parser().parse_args(args))
    source, folder = Path(given.pop("input")), Path(given.pop("folder"))
    about, left_out = make(source, folder, **given)
    if left_out:
        print(printable(f"{source}: {len(left_out)} left out:\n  {left_out}"), file=sys.stderr)
    print(
        f"{short(folder)}: {about['n_tokens']:,} tokens ({about['tokenizer']}, {about['dtype']}) of "
        f"{about['n_documents']:,} documents, {about['n_bytes']:,} bytes, in {len(about['shards']):,} shards\n"
        f"train from it: --data TextStream --data.source prepared --data.root {folder} --data.shuffle_seed 0"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        "lit-effattn data prepare",
        description="Tokenize a text larger than memory, in parallel, into files that training maps. After an "
        "interruption the same command continues.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("input", metavar="INPUT", help="A file, or a folder: .txt or .jsonl, as they are or with .gz.")
    made.add_argument("folder", metavar="FOLDER", help="The folder to create, or to continue.")
    made.add_argument("--tokens", choices=[*KINDS], help="How to tokenize; all but bytes are learnt.")
    made.add_argument("--vocab_size", type=int, help="words, bpe: size of the vocabulary.")
    made.add_argument("--tokenizer_of", type=Path, help="A checkpoint whose tokenizer to use, in place of these.")
    made.add_argument("--field", help="Name of the text in the lines of a .jsonl.")
    made.add_argument("--held_out", type=int, help="Of this many documents, one is for validation and one for test.")
    made.add_argument("--shard_bytes", type=int, help="Bytes of input for a shard.")
    made.add_argument("--learn_bytes", type=int, help="Bytes of text to learn a vocabulary from.")
    made.add_argument("--workers", type=int, help="Number of processes.")
    options = inspect.signature(make).parameters.values()
    made.set_defaults(**{o.name: o.default for o in options if o.default is not inspect.Parameter.empty})
    return made
