"""`lit-effattn data prepare`: tokenizing a text larger than memory into files, which training maps."""

import argparse
import shlex
import sys
from pathlib import Path

from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.text.prepare import prepare as make
from lit_effattn.datamodules.text.token_store import TokenStore
from lit_effattn.datamodules.text.tokenizers import KINDS
from lit_effattn.settings.tools import tool_parser


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "data prepare",
        "Tokenize a text larger than memory, in parallel, into files that training maps. After an "
        "interruption the same command continues.",
    )
    parser.add_argument("input", metavar="INPUT", help="A file, or a folder: .txt, .jsonl or .fasta, or with .gz.")
    parser.add_argument("folder", metavar="FOLDER", help="The folder to create, or to continue.")
    parser.add_argument(
        "--tokens", choices=KINDS, help="How to tokenize; characters, words and bpe are learnt. Default: bytes."
    )
    parser.add_argument("--vocab_size", type=int, help="words, bpe: size of the vocabulary.")
    parser.add_argument("--tokenizer_of", help="A checkpoint (or model:NAME) whose tokenizer to use in place of these.")
    parser.add_argument("--field", default="text", help="Name of the text in a .jsonl. Default: %(default)s.")
    parser.add_argument(
        "--held_out", type=int, help="One of so many documents is for validation, one for test. Default: 200."
    )
    for option, default, what in (
        ("--shard_bytes", 256_000_000, "Bytes of input for a shard."),
        ("--learn_bytes", 100_000_000, "Bytes of text to learn a vocabulary from."),
        ("--workers", 1, "Number of processes."),
    ):
        parser.add_argument(option, type=int, default=default, help=f"{what} Default: %(default)s.")
    return parser


def prepare(args: list[str]) -> None:
    """Tokenize a text, or continue after an interruption.

    Raises:
        FileNotFoundError: If there is no input.
        ValueError: If the folder has other settings or another input, or an argument is invalid.
    """
    given = vars(_parser().parse_args(args))
    source, folder = Path(given.pop("input")), Path(given.pop("folder"))
    about, left_out = make(source, folder, **given)
    if left_out:
        print(printable(f"{source}: {len(left_out)} left out:\n  {left_out}"), file=sys.stderr)
    if replaced := TokenStore(folder).replaced:
        print(f"{source}: {replaced}", file=sys.stderr)
    print(
        f"{short(folder)}: {about['n_tokens']:,} tokens ({about['tokenizer']}, {about['dtype']}) of "
        f"{about['n_documents']:,} documents, {about['n_bytes']:,} bytes, in {len(about['shards']):,} shards\n"
        f"train from it: --data TextStream --data.source prepared --data.root {shlex.quote(str(folder))} "
        "--data.shuffle_seed 0"
    )
