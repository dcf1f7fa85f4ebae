"""Texts as sequences of bytes or other tokens, each with its class."""

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.labelled import LabelledBatch, pad_labelled, warn_of_untrained
from lit_effattn.datamodules.common.packing import pack
from lit_effattn.datamodules.common.sampling import digest
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.pairs import sources as pair_sources
from lit_effattn.datamodules.pairs.base import Items, LengthBatched
from lit_effattn.datamodules.pairs.sources import PairSource
from lit_effattn.datamodules.text.text_stream import saved_tokenizer
from lit_effattn.datamodules.text.token_store import replaced
from lit_effattn.datamodules.text.tokenizers import ByteTokenizer, check_vocabulary_state, vocabulary_state

_MIN_WITH_HEADER = 10  # texts in which a header is recognised
_SHOWN = 10  # classes that a message names


class _Split(NamedTuple):
    """The texts of a split and their labels."""

    tokens: np.ndarray  # all tokens, one text after the other
    borders: np.ndarray  # (n + 1,): text i is `tokens[borders[i] : borders[i + 1]]`
    labels: np.ndarray | None  # (n,), numbers of classes; None: they are unknown
    n_cut: int  # how many texts were longer than `max_len`


class LabelledTexts(LengthBatched):
    """Texts and their classes, in batches of similar length: the byte-level text classification of Tay et al. 2020.

    A batch is a `LabelledBatch` whose `x` is (B, N) bytes of UTF-8 or other tokens, 0 in the padding. Training batches
    are a pure function of (seed, epoch), and every process has the same number of them. An interrupted epoch resumes
    with the next batch. In validation, test and prediction every text occurs exactly once over all processes, the
    longest first.

    The texts are held in memory. Lines without a text and a class, or not in UTF-8, and header rows are left out; a
    warning counts them by reason and names the first few. The classes are the different labels of all splits without
    white space around them, sorted.

    Args:
        root: A folder with train.tsv, val.tsv and test.tsv, whose lines are a text, a TAB and a class; or the same in
            .csv; or objects in .jsonl, whose class may be an integer or a truth value. Or a single file. Without files
            for validation and test, the texts are divided 90/5/5.
        path: Instead of `root`, name or folder of a data set of Hugging Face.
        subset: Configuration of the data set `path`, if it has several.
        text_column: Name of the text. `review.body` is the field body in the field review. Default: text.
        label_column: Name of the class. Default: label. Columns without a row of names are a text and a class.
        max_len: Longer texts are cut to their first so many tokens.
        batch_tokens: Maximum number of positions of a training batch of one process, padding included.
        packed: Texts of all lengths are in a training batch, end to end in one row without padding: see
            `datamodules.pack`. Otherwise, and in evaluation, a batch has texts of similar length.
        batch_texts: Maximum number of texts in a batch, in training and evaluation. Default: no maximum.
        tokenizer_of: A checkpoint of a language model, causal or masked, whose tokenizer is used in place of bytes: to
            fine-tune that model (`--init_weights`).
        options: Arguments of `LengthBatched`.

    Attributes:
        left_out: For each split, what is left out, by reason.

    Raises:
        ValueError: If an argument is out of its range or does not apply to the corpus.
    """

    n_features = None
    """None: the sequences are tokens."""

    def __init__(
        self,
        root: str | None = None,
        *,
        path: str | None = None,
        subset: str | None = None,
        text_column: str = "text",
        label_column: str = "label",
        max_len: int = 4096,
        batch_tokens: int = 32768,
        packed: bool = False,
        batch_texts: int | None = None,
        tokenizer_of: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_texts, batch_tokens=batch_tokens, **options)
        self.save_hyperparameters(logger=False)
        if (root is None) == (path is None):
            raise ValueError(
                f"root={root!r}, path={path!r}: give one of them, the file, folder or data set of the texts"
            )
        if path is None and subset is not None:
            raise ValueError(f"subset={subset!r} is of a data set path, but root={root!r} was given; leave it out")
        at_least(1, max_len=max_len, batch_texts=batch_texts)
        self.name = str(path if root is None else root)
        self.columns = (text_column, label_column)
        self._options = root, path, subset
        self.max_len = max_len
        self.packed = packed
        self._tokenizer_of = tokenizer_of
        self._tokenizer = None if tokenizer_of is None else saved_tokenizer(tokenizer_of)

    @property
    def places(self) -> list[Path]:
        """The file or folder that the texts are read from. It may be missing."""
        root = self._options[0]
        return [] if root is None else [Path(root)]

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 256 bytes, or those of the tokenizer."""
        return 256 if self._tokenizer is None else self._tokenizer.n_tokens

    @property
    def tokenizer(self) -> str | None:
        """The vocabulary of `tokenizer_of` in JSON; None: the tokens are bytes."""
        return None if self._tokenizer is None else self._tokenizer.to_json()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels. The texts are read on first access.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If there are no texts to train on, or fewer than two classes.
        """
        return self._corpus[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the longest sequence, `max_len`."""
        return (self.max_len,)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens (N,)."""
        ids = tokens.tolist()
        return bytes(ids).decode(errors="replace") if self._tokenizer is None else self._tokenizer.decode(ids)

    @cached_property
    def _corpus(self) -> tuple[tuple[str, ...], dict[str, _Split]]:
        """The classes, and the texts by split."""
        source = self._source()
        texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        labels: dict[str, list[str]] = {split: [] for split in SPLITS}
        for split in SPLITS:
            faults = self.left_out[split] = Faults()
            for pair in source.pairs(split, faults):
                texts[split].append(pair.source.encode())
                labels[split].append(_class_name(pair.target))
            if not texts[split]:
                first = f"; left out: {faults.first}" if faults else ""
                raise ValueError(f"{self.name}: no text with a class for {split!r}{first}; add some")
        if self._options[0] is not None:
            self._drop_header(texts, labels)
        trained = {*texts["train"]}
        for split in ("val", "test"):
            if n := sum(text in trained for text in texts[split]):
                rank_zero_warn(f"{self.name}: {n:,} texts of {split!r} are in the training texts, too")
        classes = tuple(sorted({*labels["train"], *labels["val"], *labels["test"]}))
        self._check_classes(classes, labels["train"])
        numbers = {name: label for label, name in enumerate(classes)}
        return classes, {s: self._split(texts[s], np.array([numbers[name] for name in labels[s]])) for s in SPLITS}

    def _source(self) -> PairSource:
        _, path, subset = self._options
        if path is not None:
            return pair_sources.huggingface(path, subset, self.columns, numbers=True)
        return pair_sources.files(self.places[0], self.columns, numbers=True)

    def _drop_header(self, texts: dict[str, list[bytes]], labels: dict[str, list[str]]) -> None:
        """Leave out first rows whose class is nowhere else in a data set of at least ten texts and three classes."""
        counts = Counter(label for of_split in labels.values() for label in of_split)
        rows = pair_sources.first_rows(self.places[0], self.columns)
        first_rows = [(row.source.encode(), _class_name(row.target)) for row in rows]
        firsts = Counter(name for _, name in first_rows)
        repeated = len(set(labels["train"])) < len(labels["train"])
        if counts.total() < _MIN_WITH_HEADER or len(counts) <= 2 or not repeated:
            return
        for split, of_split in labels.items():
            is_first = (texts[split][0], name := of_split[0]) in first_rows
            if is_first and counts[name] == firsts[name] and len(of_split) > 1:
                message = f"{self.name}: the first text of {split!r} has a class of its own, {name!r}"
                self.left_out[split].add(Fault("header row", message))
                del texts[split][0], of_split[0]

    def _check_classes(self, classes: tuple[str, ...], train: list[str]) -> None:
        if (truth := {"true", "false"} & {*classes}) and (digits := {"0", "1"} & {*classes}):
            raise ValueError(
                f"{self.name}: {min(truth)!r} and {min(digits)!r} are both classes; write the truth value in one way"
            )
        folded = Counter(map(str.casefold, classes))
        if alike := [name for name in classes if folded[name.casefold()] > 1]:
            rank_zero_warn(f"{self.name}: {', '.join(map(repr, alike[:_SHOWN]))} are different classes")
        if len(classes) < 2:
            raise ValueError(f"{self.name}: {classes[0]!r} is the only class; add texts of another class")
        if len(train) > 2 and len(set(train)) == len(train):
            raise ValueError(
                f"{self.name}: each of the {len(train)} training texts has a different class, such as {train[0]!r}; "
                "a line is a text, a TAB and its class; or choose label_column"
            )

    def _split(self, texts: list[bytes], labels: np.ndarray | None) -> _Split:
        if self._tokenizer is None:
            tokens = [np.frombuffer(text, np.uint8) for text in texts]
        else:
            tokens = [self._tokenizer.encode(text.decode()).astype(np.int32) for text in texts]
            if empty := [text.decode() for text, of_text in zip(texts, tokens, strict=True) if not len(of_text)]:
                raise ValueError(
                    f"{self.name}: the tokenizer of {self._tokenizer_of} gives no tokens for {empty[0]!r:.80}, one of "
                    f"{len(empty):,} such texts; delete them, or leave out tokenizer_of"
                )
        cut = [of_text[: self.max_len] for of_text in tokens]
        borders = np.cumsum([0, *map(len, cut)])
        n_cut = sum(len(of_text) > self.max_len for of_text in tokens)
        return _Split(np.concatenate(cut), borders, labels, n_cut)

    def _open(self, splits: tuple[str, ...]) -> dict[str, int]:
        return {split: len(self._corpus[1][split].borders) - 1 for split in splits}

    def _report(self, splits: tuple[str, ...], counts: str) -> None:
        classes, texts = self._corpus
        more = f" and {len(classes) - _SHOWN} more" if len(classes) > _SHOWN else ""
        n_cut = sum(texts[split].n_cut for split in splits)
        cut = f"; {n_cut:,} cut to max_len={self.max_len}" if n_cut else ""
        rank_zero_info(f"{self.name}: {counts}; {len(classes)} classes: {', '.join(classes[:_SHOWN])}{more}{cut}")
        if self._tokenizer is not None and self._tokenizer.n_replaced:
            rank_zero_warn(f"{self.name}: {replaced(self._tokenizer, self._tokenizer.n_replaced)}")
        warn_of_untrained(splits, {s: np.asarray(of_split.labels).tolist() for s, of_split in texts.items()}, classes)
        for split in splits:
            if faults := self.left_out[split]:
                rank_zero_warn(f"{split}: {len(faults)} are left out:\n  {faults}")

    def state_dict(self) -> dict[str, str]:
        """Return a description and a digest of the vocabulary."""
        return vocabulary_state(self._tokenizer or ByteTokenizer())

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Check that the checkpoint has the same vocabulary.

        Raises:
            ValueError: If the vocabularies differ. The message describes both.
        """
        check_vocabulary_state(state_dict, f"tokenizer_of={self._tokenizer_of!r}", self._tokenizer or ByteTokenizer())

    def _items(self, split: str) -> "LabelledBytes":
        if self._reads_own_texts:
            if self._tokenizer is not None:
                self._warn_of_unknown(self._tokenizer)
            texts = self._split([line.encode() for line in self._lines], None)
            if texts.n_cut:
                rank_zero_warn(f"{texts.n_cut:,} of {len(self._lines):,} texts are cut to max_len={self.max_len}")
            return LabelledBytes(texts)
        return LabelledBytes(self._corpus[1][split], packed=self.packed and split == "train")


def _class_name(label: str) -> str:
    return normalize("NFC", label.strip())


class LabelledBytes(Items):
    """The texts of a split, and their classes."""

    def __init__(self, texts: _Split, packed: bool = False) -> None:
        self.texts = texts
        self.packed = packed

    def __len__(self) -> int:
        return len(self.texts.borders) - 1

    def lengths(self) -> np.ndarray:
        """(n,), number of tokens of each text."""
        return np.diff(self.texts.borders)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of texts, and a digest of them and their labels."""
        tokens, borders, labels, _ = self.texts
        return {"texts": len(self), "digest": digest(tokens, borders, labels)}

    def __getitem__(self, indices: list[int]) -> LabelledBatch:
        tokens, borders, labels, _ = self.texts
        numbers = np.array(indices) % len(self)
        classes = np.zeros(len(self), int) if labels is None else labels
        rows = [(torch.tensor(tokens[borders[i] : borders[i + 1]]), classes[i]) for i in numbers]
        batch = pad_labelled(rows)._replace(indices=torch.from_numpy(numbers))
        batch = batch._replace(labels=None) if labels is None else batch
        return pack(batch) if self.packed else batch
