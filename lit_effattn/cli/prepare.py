"""`lit-effattn data prepare`: tokenizing a text larger than memory into files, which training maps."""

from __future__ import annotations

import sys
from pathlib import Path

from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.text.prepare import prepare as make
from lit_effattn.settings import parsers


def prepare(args: list[str]) -> None:
    """Tokenize a text, or continue after an interruption.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no input.
        ValueError: If the folder has other settings or another input, or an argument is invalid.
    """
    given = vars(parsers.prepare().parse_args(args))
    source, folder = Path(given.pop("input")), Path(given.pop("folder"))
    about, left_out = make(source, folder, **given)
    if left_out:
        print(printable(f"{source}: {len(left_out)} left out:\n  {left_out}"), file=sys.stderr)
    print(
        f"{short(folder)}: {about['n_tokens']:,} tokens ({about['tokenizer']}, {about['dtype']}) of "
        f"{about['n_documents']:,} documents, {about['n_bytes']:,} bytes, in {len(about['shards']):,} shards\n"
        f"train from it: --data TextStream --data.source prepared --data.root {folder} --data.shuffle_seed 0"
    )
