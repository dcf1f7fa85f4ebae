"""Text in parallel streams, for language models with a memory."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.checks import applicable, at_least, one_of
from lit_effattn.datamodules.common.base import DataModule
from lit_effattn.datamodules.common.sampling import processes
from lit_effattn.datamodules.common.splits import PURPOSES, SPLITS_OF
from lit_effattn.datamodules.common.store import default_cache
from lit_effattn.datamodules.text import sources as text_sources
from lit_effattn.datamodules.text import streams
from lit_effattn.datamodules.text.sources import TextSource
from lit_effattn.datamodules.text.token_store import TokenStore
from lit_effattn.datamodules.text.tokenization import tokenized
from lit_effattn.datamodules.text.tokenizers import (
    KINDS,
    ByteTokenizer,
    Tokenizer,
    check_vocabulary,
    check_vocabulary_state,
    vocabulary_state,
)


class _Source(NamedTuple):
    tokens: str  # default
    root: str | None  # default
    options: tuple[str, ...]  # arguments that other sources reject


_SOURCES = {
    "stdlib": _Source("bytes", None, ("max_bytes",)),
    "enwik8": _Source("bytes", "data", ("root", "max_bytes")),
    "text8": _Source("characters", "data", ("root", "max_bytes")),
    "wikitext103": _Source("words", "data/wikitext-103", ("root",)),
    "files": _Source("bytes", None, ("root", "glob", "column")),
    "huggingface": _Source("bytes", None, ("path", "subset", "column")),
    "prepared": _Source("bytes", None, ("root",)),  # a token store
}
_TAKES = {name: source.options for name, source in _SOURCES.items()}


class TextStream(DataModule):
    """Text as contiguous streams of tokens, read segment by segment: batch t holds segment t of every stream.

    A batch is a `TokenBatch` (B, N). The text of a split is divided into B · processes contiguous streams, B for each
    process. A stream has the same row in all batches, so a memory can be carried from batch to batch. Every epoch has
    the same streams, unless `shuffle_seed` is given. In training, the rest of the text, less than one segment per
    stream, is dropped.

    Every document is read from `<start>`, an additional token of the vocabulary, so its first token is predicted too.
    In validation and test every token of the text is scored exactly once, for any batch size and number of processes;
    `<start>` is never scored. If a stream starts in the middle of a document, its first token is predicted from the
    previous token alone; eval_batch_size=1 on one process gives every token its full context.

    `predict` uses the test text.

    Args:
        source: stdlib: the sources of the running Python's standard library, about 11 MB, each file a document; needs
            no network. enwik8, text8: the file of that name, divided 90/5/5, each part one document. wikitext103:
            wiki.train.tokens and so on, each one document. files: a text file, divided 90/5/5; or a folder, each file a
            document; its subfolders train, val and test are the splits, otherwise files are divided by name, 90/5/5.
            Each line of a .jsonl and each record of a FASTA file is a document; without subfolders, every 20th is for
            test, and the next for validation. huggingface: a data set, each row a document; its splits train,
            validation and test, or every 20th row of train. prepared: a folder that `lit-effattn data prepare` made of
            a text of any size; it has its own tokenizer and splits.
        tokens: bytes: the 256 bytes. characters: those of the training text. words: separated by white space, with
            `<eos>` for line ends. bpe: byte-pair encoding, learnt from the training text. amino_acids: the one-letter
            code of proteins. Characters and words that are not in the training text are `<unk>`, letters that are no
            amino acid X. Default: bytes; for text8 characters, for wikitext103 words.
        segment_len: N in training.
        eval_segment_len: N in validation, test and prediction; default: `segment_len`.
        batch_size: B in training: streams of each process.
        eval_batch_size: B in validation, test and prediction; default: `batch_size`.
        vocab_size: words, bpe: maximum size of the vocabulary, special tokens included. Default for words: no limit;
            required for bpe.
        documents: apart: a document starts a new segment, marked `fresh`, and gets no memory of the previous one, whose
            last segment may be short. joined: segments cross documents' borders without padding, and memory is kept.
            packed: as joined, but a document depends on nothing before it, neither on the memory nor on other documents
            of its segment (`TokenBatch.starts`). Every token then has the same context as with apart, if memory is
            carried, without padding between short documents. whole: rows are filled with whole documents, for models
            that carry no memory: a document is divided only if it is longer than a segment.
        num_workers: Worker processes that load data; 0: none.
        root: enwik8, text8, wikitext103: folder of the files; default: data, data, data/wikitext-103.
            files, prepared: the folder (or file); required.
        glob: files: pattern of the files in a folder, such as `**/*.md`; default: all that end in .txt, .jsonl or, for
            FASTA, .fasta, .fas, .fa, .faa, .fna, .ffn, .frn, all but .txt also with .gz. Others, hidden files and empty
            ones are left out, counted and named.
        path: huggingface: name or folder of the data set; required.
        subset: huggingface: configuration of the data set, if it has several.
        column: huggingface: column of the text; files: name of the text in a .jsonl; default: text. `review.body` is
            the field body in the field review.
        max_bytes: stdlib, enwik8, text8: maximum number of bytes of text to use.
        tokenizer_of: A checkpoint of a language model, whose tokenizer is used, in place of `tokens` and `vocab_size`:
            to fine-tune or test that model on another text. A pretrained tokenizer encodes each document as a whole.
        shuffle_seed: Training reads the documents in another order every epoch, drawn with this seed; None: always in
            the source's order. It takes 40 bytes of memory a document; with documents=whole, 64.
        cache: Folder for tokens and vocabularies. They are made once for a source and its settings, and again if one
            has changed. May be deleted at any time. Default: lit-effattn in $XDG_CACHE_HOME, which defaults to
            ~/.cache.

    Raises:
        ValueError: If an argument is out of its range or does not apply to the source.
    """

    _loader = streams.StreamLoader

    def __init__(
        self,
        source: Literal["stdlib", "enwik8", "text8", "wikitext103", "files", "huggingface", "prepared"] = "stdlib",
        *,
        tokens: Literal["bytes", "characters", "words", "bpe", "amino_acids"] | None = None,
        segment_len: int = 64,
        eval_segment_len: int | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        vocab_size: int | None = None,
        documents: Literal["apart", "joined", "packed", "whole"] = "apart",
        num_workers: int = 0,
        root: str | None = None,
        glob: str | None = None,
        path: str | None = None,
        subset: str | None = None,
        column: str | None = None,
        max_bytes: int | None = None,
        cache: str | None = None,
        tokenizer_of: str | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
        super().__init__(num_workers)
        self.save_hyperparameters(logger=False)
        options = {"root": root, "glob": glob, "path": path, "subset": subset, "column": column, "max_bytes": max_bytes}
        _check_options(source, **options)
        at_least(1, segment_len=segment_len, eval_segment_len=eval_segment_len, max_bytes=max_bytes)
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(0, shuffle_seed=shuffle_seed)
        one_of(("apart", "joined", "packed", "whole"), documents=documents)
        self.source: str = source
        check_tokenizer_of(tokenizer_of, tokens, vocab_size)
        if source == "prepared" and (tokens, tokenizer_of) != (None, None):
            raise ValueError(
                f"source='prepared' brings its tokenizer; leave out tokens={tokens!r} and tokenizer_of={tokenizer_of!r}"
            )
        self._tokens = _SOURCES[source].tokens if tokens is None else tokens
        check_vocabulary(vocab_size, tokens=self._tokens)
        self._tokenizer_of = tokenizer_of
        self.segment_len = segment_len
        self.eval_segment_len = segment_len if eval_segment_len is None else eval_segment_len
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.documents = documents
        self.shuffle_seed = shuffle_seed
        self.cache = default_cache() if cache is None else Path(cache)
        self._vocab_size = vocab_size
        self._options: dict[str, Any] = options | {"root": root or _SOURCES[source].root, "column": column or "text"}

    @property
    def places(self) -> list[Path]:
        """Files and folders that the text is read from. They may be missing."""
        if (root := self._options["root"]) is None:
            return []
        return [Path(root, self.source) if self.source in ("enwik8", "text8") else Path(root)]

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, including `<start>`, its last token. Made on first access, except for bytes.

        Raises:
            FileNotFoundError: If the source is missing.
            ValueError: If the source cannot be tokenized.
        """
        return self._tokenizer.n_tokens

    @property
    def tokenizer(self) -> str:
        """The vocabulary in JSON, for `datamodules.tokenizers.Tokenizer.from_spec`. Made like `vocab_size`."""
        return self._tokenizer.to_json()

    @property
    def unit(self) -> str:
        """Name of the unit that a token represents: byte, character or token."""
        return self._kind.unit

    @property
    def tokens(self) -> str:
        """Name of the kind of tokens."""
        return self._kind.kind

    @property
    def _kind(self) -> type[Tokenizer]:
        return KINDS[self._tokens] if self._given is None else type(self._given)

    @cached_property
    def _given(self) -> Tokenizer | None:
        if self.source == "prepared":
            return self._store.tokenizer
        return None if self._tokenizer_of is None else saved_tokenizer(self._tokenizer_of)

    def documents_at(self, split: str, offsets: np.ndarray) -> tuple[np.ndarray, int, list[str]]:
        """Return the numbers of the documents at offsets of a split, how many it has, and their titles, if any."""
        borders = self._store.split(split).borders
        return np.searchsorted(borders, offsets, side="right") - 1, len(borders) - 1, self._store.titles(split)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._given or (ByteTokenizer() if self.tokens == "bytes" else self._store.tokenizer)

    @cached_property
    def _store(self) -> TokenStore:
        if self.source == "prepared":
            return TokenStore(Path(self._options["root"]))
        return tokenized(self._text(), self._kind, self._vocab_size, self.cache, self._given)

    def _text(self) -> TextSource:
        """Return the text, which a subclass may read in its own way."""
        options, whole = self._options, self.tokens != "bytes"
        if self.source == "stdlib":
            return text_sources.stdlib(options["max_bytes"])
        if self.source == "huggingface":
            return text_sources.huggingface(options["path"], options["subset"], options["column"])
        root = Path(options["root"])
        if self.source == "wikitext103":
            return text_sources.wikitext103(root)
        if self.source == "files":
            return text_sources.files(root, options["glob"], options["column"], whole_characters=whole)
        return text_sources.benchmark(self.source, root, whole_characters=whole, max_bytes=options["max_bytes"])

    def prepare_data(self) -> None:
        """Tokenize the text unless an earlier run did.

        Raises:
            FileNotFoundError: If the source is missing.
            ValueError: If the source cannot be tokenized.
        """
        _ = self._store

    def setup(self, stage: str) -> None:
        """Open the tokens and log their number, and the files that are left out."""
        counts = [f"{self._store.n_tokens[split]:,} {PURPOSES[split]}" for split in SPLITS_OF[stage]]
        rank_zero_info(f"{self.source}: {', '.join(counts)}; vocabulary of {self.vocab_size:,} {self.tokens}")
        if replaced := self._store.replaced:
            rank_zero_warn(f"{self.source}: {replaced}")
        shared = self._store.n_shared if self.source in ("files", "huggingface") else {}
        for split, n in ((split, n) for split, n in shared.items() if n and split in SPLITS_OF[stage]):
            rank_zero_warn(f"{self.source}: {n:,} documents of {split!r} are in the training text, too")
        root, glob = self._options["root"], self._options["glob"]
        if self.source == "files" and (faults := text_sources.unread(Path(root), glob)):
            rank_zero_warn(f"{root}: {len(faults)} left out:\n  {faults}")

    def _batches(self, split: str, training: bool) -> tuple[streams.TokenStreams, streams.InOrder]:
        segment_len = self.segment_len if training else self.eval_segment_len
        data = self._streams(split, segment_len, self.batch_size if training else self.eval_batch_size)
        return data, (streams.EpochInOrder if isinstance(data, streams.ShuffledStreams) else streams.InOrder)(data)

    def _streams(self, split: str, segment_len: int, batch_size: int) -> streams.TokenStreams:
        documents = self._store.split(split)
        options: dict[str, Any] = {
            "start": self._tokenizer.start,
            "segment_len": segment_len,
            "batch_size": batch_size,
            **processes(self.trainer),
            "joined": self.documents != "apart",
            "packed": self.documents == "packed",
            "drop_last": split == "train",
        }
        whole = self.documents == "whole"
        if split != "train" or self.shuffle_seed is None:
            return (streams.WholeDocuments if whole else streams.TokenStreams)(documents, documents.borders, **options)
        shuffled = streams.ShuffledWholeDocuments if whole else streams.ShuffledStreams
        return shuffled(documents, shuffle_seed=self.shuffle_seed, **options)

    def state_dict(self) -> dict[str, str]:
        """Return a description and a digest of the vocabulary."""
        return vocabulary_state(self._tokenizer)

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Check that the checkpoint has the same vocabulary.

        Raises:
            ValueError: If the vocabularies differ. The message describes both.
        """
        check_vocabulary_state(state_dict, f"source={self.source!r}", self._tokenizer)


def _check_options(source: str, **options: Any) -> None:
    applicable("source", source, _TAKES, **options)
    if source == "files" and options["root"] is None:
        raise ValueError("root=None: source='files' needs the folder or file of the text, such as root=data/books")
    if source == "prepared" and options["root"] is None:
        raise ValueError("root=None: source='prepared' needs the folder that `lit-effattn data prepare` made")
    if Path(options["glob"] or "").is_absolute():
        raise ValueError(f"glob={options['glob']!r} must be relative to root={options['root']!r}, such as **/*.md")
    if source == "huggingface" and options["path"] is None:
        raise ValueError("path=None: source='huggingface' needs the data set's name, such as path=Salesforce/wikitext")


def check_tokenizer_of(checkpoint: str | Path | None, tokens: str | None, vocab_size: int | None) -> None:
    """Raise ValueError if a vocabulary is chosen beside the checkpoint `tokenizer_of`."""
    if checkpoint is not None and (tokens, vocab_size) != (None, None):
        raise ValueError(
            f"tokenizer_of={str(checkpoint)!r} brings its vocabulary; leave out tokens={tokens!r} and "
            f"vocab_size={vocab_size}, or set them to null"
        )


def saved_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """Return the tokenizer of the language model in a checkpoint (or `model:NAME`), which is read as data.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a checkpoint, or its model has no tokenizer.
    """
    from lit_effattn.checkpoints.io import read_outline

    named = f"tokenizer_of={str(checkpoint)!r}"
    try:
        settings = read_outline(checkpoint).get("hyper_parameters")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{named}: there is no such file; name a checkpoint, or model:NAME") from error
    except ValueError as error:
        raise ValueError(f"{named} can't be read as a checkpoint: {error}") from error
    spec = settings.get("tokenizer") if isinstance(settings, dict) else None
    if not isinstance(spec, str):
        raise ValueError(f"{named} has no tokenizer; name a language model's checkpoint")
    return Tokenizer.from_spec(spec)
