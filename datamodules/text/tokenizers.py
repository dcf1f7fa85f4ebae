"""Tokenizers: bytes, characters, words, byte-pair encoding, those of pretrained models, and token numbers."""

import codecs
import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lit_effattn.datamodules.common.json_data import parse_json

EOS = "<eos>"
UNK = "<unk>"
_MOST_TOKENS = 1024  # tokens of a character; a byte of a normal vocabulary is one
_LONGEST = 10_000  # characters of a word; longer ones are cut
_ENDS = re.compile(rf"\n|\S{{{_LONGEST}}}(?=\S)")  # of a line, and within a longer word
_MOST_OF_LONG = 2_000_000  # characters of longer words that byte pairs are learnt from
_AT_ONCE = 4096  # lines or pieces of words encoded at a time
_EOS = re.compile(f" ?{EOS} ?")
_WORD = re.compile(r"[\S\x1c-\x1f]+")  # the package's white space is that of Unicode, unlike Python's
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def _line_or_word_end(block: bytes) -> int:
    """Return the last position after a line end, else before a space after a visible ASCII character; 0: none.

    White space other than the space may have two bytes, or belong to the token before it.
    """
    if line := block.rfind(b"\n") + 1:
        return line
    space = block.rfind(b" ")
    while space > 0 and not 0x20 < block[space - 1] < 0x7F:
        space = block.rfind(b" ", 0, space)
    return max(space, 0)


class Tokenizer(ABC):
    """A vocabulary with its encoding and decoding.

    The last token of every vocabulary but a pretrained one is `<start>`. It is read before the first token of a
    document, so that this token is predicted and scored like any other. `<start>` does not occur in texts, and decodes
    to nothing. In a stream of documents it is never predicted. In `PairBatch` it is also the end of a sequence, which
    is predicted.

    A long text may be encoded in pieces. If it is cut at the positions that `cut` returns, the pieces give the same
    tokens as the whole.

    Args:
        vocabulary: Plain data that describe the vocabulary; None: the kind says it all.
        n_tokens: Size of the vocabulary, `<start>` included.
        start: The token `<start>`. Default: the last, which then does not occur in texts.
        end: The token at which beam search ends a text, or None.

    Raises:
        ValueError: If `start` or `end` is not in the vocabulary.
    """

    kind: ClassVar[str]  # bytes, characters, words, bpe or amino_acids; or pretrained or numbers, which are not learnt
    unit: ClassVar[str] = "token"  # what a token represents, for reports: byte, character or token
    separator: ClassVar[str] = ""  # the text between a text and the decoded tokens that follow it
    saved_as: ClassVar[type] = type(None)  # of `vocabulary`
    replaces: ClassVar[tuple[str, str]] = ("characters", UNK)  # what a vocabulary may lack, and as what it is read
    n_replaced = 0  # number of these encoded so far

    def __init__(self, vocabulary: Any, n_tokens: int, start: int | None = None, end: int | None = None) -> None:
        self.vocabulary, self.n_tokens, self.end = vocabulary, n_tokens, end
        self.start = n_tokens - 1 if start is None else start
        self.largest = n_tokens - (2 if start is None else 1)  # token of a text
        self._check(start=start, end=end)

    def _check(self, **tokens: int | None) -> None:
        for name, token in tokens.items():
            if token is not None and not 0 <= token < self.n_tokens:
                raise ValueError(
                    f"the tokenizer has {name}={token}, beyond the model's vocabulary of {self.n_tokens} tokens; use "
                    "the tokenizer of that model"
                )

    @abstractmethod
    def encode(self, text: str | bytes) -> np.ndarray:
        """Encode a text, (n,). Bytes must be UTF-8, except for the tokenizer of bytes."""

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Encode several texts separately."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text."""

    def unknown(self, text: str) -> list[str]:
        """Return the parts of a text that become `<unk>`, each once, in order. Bytes and bpe have none."""
        return []

    def token_bytes(self) -> np.ndarray | None:
        """Return the number of bytes of text of each token, (n_tokens,); None: the numbers would not be exact.

        Over the tokens of a text they sum to its bytes in UTF-8. `<start>`, which is not of a text, has 0.
        """
        return None

    def spec(self) -> dict[str, Any]:
        """Return the tokenizer as plain data, the input of `from_spec`."""
        return {"tokens": self.kind} | ({} if self.vocabulary is None else {"vocabulary": self.vocabulary})

    @staticmethod
    @abstractmethod
    def cut(block: bytes) -> int:
        """Return the length of the prefix that can be encoded without the text that follows; 0: none."""

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None) -> "Tokenizer":
        """Learn a vocabulary from a text. By default nothing is learnt: the kind has one vocabulary.

        Args:
            texts: The text in pieces.
            vocab_size: Maximum number of tokens; None: no limit.
        """
        return cls()  # type: ignore[call-arg]

    def to_json(self) -> str:
        """Return `spec` as one line of JSON, which is the same for the same vocabulary."""
        return json.dumps(self.spec(), ensure_ascii=False, sort_keys=True)

    def __repr__(self) -> str:
        return f"{self.kind}, a vocabulary of {self.n_tokens}"

    @staticmethod
    def from_spec(spec: str | dict[str, Any]) -> "Tokenizer":
        """Create a tokenizer from the output of `spec()` or `to_json()`.

        Raises:
            ValueError: If `spec` is not valid.
        """
        try:
            content = parse_json(spec) if isinstance(spec, str) else spec
        except ValueError as error:
            raise ValueError(f"spec={str(spec)[:80]!r} does not describe a tokenizer: {error}") from error
        name = content.get("tokens") if isinstance(content, dict) else None
        kinds = KINDS | {kind.kind: kind for kind in (PretrainedTokenizer, NumberTokenizer)}
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(
                f"spec={str(spec)[:80]!r} does not describe a tokenizer; its tokens must be one of {[*kinds]}"
            )
        try:
            return kinds[name]._from(content.get("vocabulary"))
        except TypeError as error:
            raise ValueError(f"spec={str(spec)[:80]!r} does not have a vocabulary of {name}: {error}") from error

    @classmethod
    def _from(cls, vocabulary: Any) -> "Tokenizer":
        if not isinstance(vocabulary, cls.saved_as):
            raise TypeError(f"it must be of the type {cls.saved_as.__name__}")
        return cls() if vocabulary is None else cls(vocabulary)  # type: ignore[call-arg]


class ByteTokenizer(Tokenizer):
    """Bytes, 0 to 255, and `<start>`: 257 tokens for any text."""

    kind, unit = "bytes", "byte"

    def __init__(self) -> None:
        super().__init__(None, 257)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the bytes of a text. A str is encoded as UTF-8."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode bytes to text. Invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i != self.start).decode(errors="replace")

    @staticmethod
    def cut(block: bytes) -> int:
        """Return the whole length: bytes can be cut anywhere."""
        return len(block)


class CharacterTokenizer(Tokenizer):
    """Unicode characters: those of the training text in order of code points, `<unk>` for all others, `<start>`.

    Args:
        characters: The known characters, each once.
    """

    kind, unit = "characters", "character"
    saved_as: ClassVar[type] = str

    def __init__(self, characters: str) -> None:
        super().__init__(characters, len(characters) + 2)
        self.characters = characters
        self._decoded = [*characters, _UNKNOWN_CHARACTER, ""]
        self._ids = np.full(0x110000, len(characters), np.uint32)  # by code point; <unk> by default
        self._ids[_code_points(characters)] = np.arange(len(characters))

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the characters' tokens."""
        ids = self._ids[_code_points(_as_str(text))]
        self.n_replaced += int((ids == len(self.characters)).sum())
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text. `<unk>` becomes U+FFFD."""
        return "".join(self._decoded[i] for i in ids)

    def unknown(self, text: str) -> list[str]:
        """Return the characters that are not in the training text."""
        return [character for character in dict.fromkeys(text) if character not in self.characters]

    @staticmethod
    def cut(block: bytes) -> int:
        """Cut before an incomplete character at the end. Characters have at most four bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")  # invalid UTF-8 is named when the text is decoded
        decoder.decode(block[-4:])
        incomplete, _ = decoder.getstate()
        return len(block) - len(incomplete)

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None) -> "CharacterTokenizer":
        """Learn all characters of the text."""
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        return cls("".join(sorted(seen)))


class _LibraryTokenizer(Tokenizer):
    """A model of the package tokenizers. Lines are encoded separately, and words cut after each 10,000 characters."""

    cut = staticmethod(_line_or_word_end)
    _model: tokenizers.Tokenizer

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encode a text."""
        (ids,) = self.encode_all([_as_str(text)])
        return ids

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Encode several texts separately; faster than one after the other."""
        pieces = [self._pieces(text) for text in texts]
        ids = self._ids_of([piece for of_text in pieces for piece in of_text])
        return [np.fromiter((i for _ in of_text for i in next(ids)), np.uint32) for of_text in pieces]

    @staticmethod
    def _pieces(text: str) -> list[str]:
        """Return the pieces of a text that are encoded separately."""
        borders = [0, *(match.end() for match in _ENDS.finditer(text)), len(text)]
        return [text[start:stop] for start, stop in pairwise(borders) if start < stop]

    def _ids_of(self, pieces: list[str]) -> Iterator[list[int]]:
        """Yield the tokens of each piece. The package takes 100 bytes a token, so few pieces are encoded at once."""
        for i in range(0, len(pieces), _AT_ONCE):
            group = pieces[i : i + _AT_ONCE]
            with _as_value_error("the tokenizer can't encode a text"):
                if len(group) > 1:
                    encoded = self._model.encode_batch_fast(group, add_special_tokens=False)
                else:  # without threads, after which a fork prints a warning
                    encoded = [self._model.encode(group[0], add_special_tokens=False)]
            for piece, ids in zip(group, (of_piece.ids for of_piece in encoded), strict=True):
                if len(ids) > _MOST_TOKENS * (len(piece) + 1):
                    raise ValueError(f"the tokenizer makes {len(ids):,} tokens of {len(piece):,} characters")
                yield ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text. Invalid UTF-8 becomes U+FFFD."""
        return self._model.decode([int(i) for i in ids if i != self.start], skip_special_tokens=False)


class AminoAcidTokenizer(CharacterTokenizer):
    """The one-letter code of proteins: 25 letters and `<start>`, 26 tokens for any text.

    The 20 amino acids, B (D or N), O (pyrrolysine), U (selenocysteine), X (unknown) and Z (E or Q), in upper or lower
    case. Other characters, such as `*`, are read as X, and counted in `n_replaced`. White space is dropped.
    """

    kind, unit = "amino_acids", "token"
    saved_as = type(None)
    replaces = ("letters", "X")
    LETTERS = "ABCDEFGHIKLMNOPQRSTUVWXYZ"  # all but J

    def __init__(self) -> None:
        super().__init__(self.LETTERS)
        Tokenizer.__init__(self, None, len(self.LETTERS) + 1)
        self._decoded = [*self.LETTERS, ""]
        self._ids[:] = len(self.LETTERS)
        for letters in (self.LETTERS, self.LETTERS.lower()):
            self._ids[_code_points(letters)] = np.arange(len(letters))

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the letters' tokens."""
        ids = super().encode("".join(_as_str(text).split()))
        return np.where(ids == len(self.LETTERS), np.uint32(self.LETTERS.index("X")), ids)

    def unknown(self, text: str) -> list[str]:
        """Return the characters that are read as X."""
        return [c for c in dict.fromkeys(text) if c.upper() not in self.LETTERS and not c.isspace()]

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None) -> "AminoAcidTokenizer":
        """Return the tokenizer, which learns nothing from the text."""
        return cls()


class WordTokenizer(_LibraryTokenizer):
    """Words separated by white space, with `<eos>` for every line end, the usual tokens of WikiText-103.

    The vocabulary is that of the training text, the most frequent word first, as adaptive softmax requires. Words
    beyond `vocab_size` and unknown words are `<unk>`, which is one of `words`. `<start>` comes last.
    """

    kind, separator, saved_as = "words", " ", list
    replaces = ("words", UNK)

    def __init__(self, words: list[str]) -> None:
        self.words = words
        vocabulary = {word: i for i, word in enumerate(words)}
        with _as_value_error("words does not describe a tokenizer"):
            self._model = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
        self._model.normalizer = normalizers.Replace("\n", f" {EOS} ")
        self._model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self._unknown = vocabulary.get(UNK, -1)
        super().__init__(words, len(words) + 1, end=vocabulary.get(EOS))

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Encode several texts separately; faster than one after the other."""
        encoded = super().encode_all(texts)
        if n := sum(int((ids == self._unknown).sum()) for ids in encoded):  # as a word of the text it is not replaced
            self.n_replaced += n - sum(_WORD.findall(text).count(UNK) for text in texts)
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to words separated by spaces and line ends."""
        return _EOS.sub("\n", super().decode(ids))

    def unknown(self, text: str) -> list[str]:
        """Return the words that are not in the vocabulary."""
        return [word for word in dict.fromkeys(_words(text)) if self._model.token_to_id(word) is None]

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None) -> "WordTokenizer":
        """Learn the most frequent words. Equally frequent words are sorted alphabetically."""
        counts = Counter(word for text in texts for piece in cls._pieces(text) for word in _words(piece))
        unknown = counts.pop(UNK, 0)
        ranked = _ranked(counts)
        kept = ranked if vocab_size is None else ranked[: vocab_size - 2]  # room for <unk> and <start>
        rare = counts.total() - sum(counts[word] for word in kept)
        return cls(_ranked({**{word: counts[word] for word in kept}, UNK: unknown + rare}))


class BPETokenizer(_LibraryTokenizer):
    """Byte-pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019), learnt from the training text.

    No text has unknown tokens. No token crosses a line end. Of words with more than 10,000 characters, such as a file
    without spaces, the first 2,000,000 characters are learnt from, since each takes about 100 bytes of memory.

    Args:
        model: The model as the package saves it, read as JSON.

    Raises:
        ValueError: If it is not such a model.
    """

    kind, saved_as = "bpe", dict

    def __init__(self, model: dict[str, Any]) -> None:
        with _as_value_error(f"model={str(model)[:80]!r} is not a model of byte pairs", quiet=True):
            self._model = tokenizers.Tokenizer.from_str(json.dumps(model))
        super().__init__(model, self._model.get_vocab_size() + 1)

    def token_bytes(self) -> np.ndarray:
        """Return the number of bytes of each token: see `Tokenizer.token_bytes`."""
        return _bytes_by_token(self._model, {}, self.n_tokens)

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None) -> "BPETokenizer":
        """Merge the most frequent pairs until there are `vocab_size` tokens."""
        assert vocab_size is not None
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        # The alphabet has all 256 bytes, even if the training text does not.
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        # In pieces, since the trainer buffers 256 items at a time.
        model.train_from_iterator(cls._to_learn(piece for text in texts for piece in cls._pieces(text)), trainer)
        return cls(json.loads(model.to_str()))

    @staticmethod
    def _to_learn(pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces, of those that end within a long word the first `_MOST_OF_LONG` characters."""
        left = _MOST_OF_LONG
        for piece in pieces:
            if len(piece) < _LONGEST or piece[-1].isspace():
                yield piece
            elif left > 0:
                yield piece
                if (left := left - len(piece)) <= 0:
                    rank_zero_warn(
                        f"tokens='bpe': the text has words of more than {_LONGEST:,} characters; byte pairs are learnt "
                        f"from the first {_MOST_OF_LONG:,} characters of such words"
                    )


class PretrainedTokenizer(_LibraryTokenizer):
    """The tokenizer of a pretrained model, as its tokenizer.json describes it.

    `<start>` is a token of that vocabulary, which texts may contain too. A text is encoded as a whole, without the
    special tokens that the tokenizer would add to it.

    Args:
        model: Content of tokenizer.json.
        n_tokens: Size of the model's vocabulary, which may be larger than the tokenizer's.
        start: The token that is read before a document.
        end: The token at which beam search ends a text, or None.
        files: Content of the folder's other files that name special tokens, by file name, for conversion back.

    Raises:
        ValueError: If `model` is not valid, or a token is beyond the vocabulary.
    """

    kind = "pretrained"

    def __init__(
        self,
        model: dict[str, Any],
        n_tokens: int,
        start: int,
        end: int | None = None,
        files: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.files = model, files or {}
        fields = {"model": model, "n_tokens": n_tokens, "start": start, "end": end}
        super().__init__(fields | ({"files": self.files} if self.files else {}), n_tokens, start, end)
        with _as_value_error("the content of tokenizer.json does not describe a tokenizer", quiet=True):
            self._model = tokenizers.Tokenizer.from_str(json.dumps(model))
            self._model.no_truncation()
            self._model.no_padding()
            # Decoders remove the space before the first word of a text.
            self._anchor = self.encode("a")[-1:].tolist()
            self._anchor_len = len(self._model.decode(self._anchor, skip_special_tokens=False))
        self._check(largest=max(self._model.get_vocab(with_added_tokens=True).values(), default=-1))

    @staticmethod
    def _pieces(text: str) -> list[str]:
        return [text]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to the text that they add to one before it. Invalid UTF-8 becomes U+FFFD."""
        kept = [int(i) for i in ids if i != self.start]
        text: str = self._model.decode([*self._anchor, *kept], skip_special_tokens=False)
        return text[self._anchor_len :]

    def name_of(self, token: int | None) -> str | None:
        """Return how tokenizer.json writes a token."""
        return None if token is None else self._model.id_to_token(token)

    def token_bytes(self) -> np.ndarray | None:
        """Return the number of bytes of each token if they are byte pairs, as GPT-2's: see `Tokenizer.token_bytes`.

        With Unicode normalisation (NFC, as in Qwen), they are those of the normalised text. A special token has those
        of its name, as a text that contains it. None: the tokens are of another kind, or drop or add characters.
        """
        added = self.model.get("added_tokens") or []
        if (
            not self._model.get_vocab().keys() >= set(pre_tokenizers.ByteLevel.alphabet())
            or not _keeps_bytes(self.model)
            or any(token.get("lstrip") or token.get("rstrip") for token in added)
        ):
            return None
        names = {i: token.content for i, token in self._model.get_added_tokens_decoder().items()}
        return _bytes_by_token(self._model, names, self.n_tokens)

    @staticmethod
    def cut(block: bytes) -> int:
        """Return 0: whether a text can be cut depends on the tokenizer."""
        return 0

    @classmethod
    def _from(cls, vocabulary: dict[str, Any]) -> "PretrainedTokenizer":
        return cls(**_fields(vocabulary, model=dict))


class NumberTokenizer(Tokenizer):
    """The tokens of a vocabulary whose texts are not known: their numbers, separated by spaces.

    Args:
        n_tokens: Size of the vocabulary.
        start: The token that is read before a document. Default: the last, which then does not occur in texts.
        end: The token at which beam search ends a text, or None.
        files: See `PretrainedTokenizer`.

    Examples:
        >>> numbers = NumberTokenizer(11)
        >>> numbers.decode([7, 0, 10]), numbers.encode("7 0").tolist(), numbers.unknown("7 10 x")
        ('7 0', [7, 0], ['10', 'x'])
    """

    kind, separator = "numbers", " "
    cut = staticmethod(_line_or_word_end)

    def __init__(
        self, n_tokens: int, start: int | None = None, end: int | None = None, files: dict[str, Any] | None = None
    ) -> None:
        self.files = files or {}
        super().__init__(None, n_tokens, start, end)
        fields = {"n_tokens": n_tokens, "start": self.start, "end": end}
        self.vocabulary = fields | ({"files": self.files} if self.files else {})

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the numbers in a text.

        Raises:
            ValueError: If a word is not the number of a token.
        """
        words = _as_str(text).split()
        if unknown := next((word for word in words if not self._is_token(word)), None):
            raise ValueError(
                f"the text has {unknown[:40]!r}, where a token's number is expected, 0 … {self.largest}: the model has "
                "no tokenizer"
            )
        return np.array([int(word) for word in words], np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the tokens' numbers."""
        return " ".join(str(token) for token in ids if token != self.start)

    def unknown(self, text: str) -> list[str]:
        """Return the words that are not the number of a token, each once."""
        return [word for word in dict.fromkeys(text.split()) if not self._is_token(word)]

    def _is_token(self, word: str) -> bool:
        return word.isascii() and word.isdecimal() and len(word) < 20 and int(word) <= self.largest

    @classmethod
    def _from(cls, vocabulary: dict[str, Any]) -> "NumberTokenizer":
        return cls(**_fields(vocabulary))


def _fields(vocabulary: Any, **more: type) -> dict[str, Any]:
    """Return the arguments of a `NumberTokenizer`, and those of `more`, from plain data."""
    whole: dict[str, Any] = {**more, "n_tokens": int, "start": int, "end": (int, type(None))}
    if not isinstance(vocabulary, dict) or not all(isinstance(vocabulary.get(k), t) for k, t in whole.items()):
        raise TypeError(f"it must have {', '.join([*whole][:-1])} and end")
    files = vocabulary.get("files") or {}
    if not isinstance(files, dict) or not all(
        isinstance(v, str if k.endswith(".jinja") else dict) for k, v in files.items()
    ):
        raise TypeError("its files must be objects, by file name")
    return {name: vocabulary[name] for name in whole} | {"files": files}


KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (ByteTokenizer, CharacterTokenizer, WordTokenizer, BPETokenizer, AminoAcidTokenizer)
}
"""The tokenizers that are learnt from texts."""

_LEAST = {"words": 3, "bpe": 257}  # size of a vocabulary: a word, <unk> and <start>; all bytes and <start>


def vocabulary_state(*vocabularies: Tokenizer) -> dict[str, str]:
    """Return a description and a digest of vocabularies, for a checkpoint."""
    specs = "\n".join(tokenizer.to_json() for tokenizer in vocabularies)
    described = " to ".join(map(repr, vocabularies))
    return {"vocabulary": described, "digest": hashlib.sha256(specs.encode()).hexdigest()[:16]}


def check_vocabulary_state(saved: Mapping[str, Any], option: str, *vocabularies: Tokenizer) -> None:
    """Check that a checkpoint, which `saved` is of, has the vocabularies of data that are described by an option.

    Raises:
        ValueError: If the vocabularies differ. The message describes both.
    """
    state = vocabulary_state(*vocabularies)
    for name in state:
        if not isinstance(saved.get(name), str):
            raise ValueError(f"the checkpoint's state of the data must have a text as {name}")
    if saved["digest"] != state["digest"]:
        raise ValueError(
            f"the checkpoint's tokens are {saved['vocabulary']} (digest {saved['digest']}), but those of {option} are "
            f"{state['vocabulary']} (digest {state['digest']}): the same number means another token; use the data and "
            "the settings that the checkpoint was trained with"
        )


def check_vocabulary(vocab_size: int | None, **tokens: str) -> None:
    """Check the size of the vocabularies of one or more arguments, given by name, that choose a kind of tokens.

    Raises:
        ValueError: If a kind is not known, or the size does not apply to it.
    """
    for name, kind in tokens.items():
        if kind not in KINDS:
            raise ValueError(f"{name}={kind!r} is not known; choose one of {', '.join(KINDS)}")
        if kind == "bpe" and vocab_size is None:
            raise ValueError(f"vocab_size=None: {name}='bpe' needs the size of the vocabulary to learn, such as 8192")
        if vocab_size is not None and vocab_size < _LEAST.get(kind, 0):
            raise ValueError(f"vocab_size={vocab_size} must be at least {_LEAST[kind]} for {name}={kind!r}")
    if vocab_size is not None and not _LEAST.keys() & tokens.values():
        kinds = " and ".join(f"{name}={kind!r}" for name, kind in tokens.items())
        raise ValueError(f"vocab_size={vocab_size} does not apply to {kinds}; leave it out")


@contextmanager
def _as_value_error(message: str, *, quiet: bool = False) -> Iterator[None]:
    """Replace the errors of `tokenizers`, which has no types of its own and whose panics derive from BaseException.

    With `quiet`, discard what is written to stderr meanwhile, such as the stack of a panic.
    """
    with _without_stderr() if quiet else nullcontext():
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise ValueError(f"{message}: {' '.join(str(error).split())[:200]}") from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what is written to this process's stderr, also by libraries."""
    sys.stderr.flush()
    saved = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _bytes_by_token(model: tokenizers.Tokenizer, added: dict[int, str], n_tokens: int) -> np.ndarray:
    """Return the number of bytes of each token of a model of byte pairs, which writes a byte as a character."""
    sizes = np.zeros(n_tokens, np.int64)
    for name, token in model.get_vocab(with_added_tokens=False).items():
        sizes[token] = len(name)
    for token, content in added.items():
        sizes[token] = len(content.encode())
    return sizes


def _keeps_bytes(model: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is one of byte pairs that neither adds, drops nor changes a character, but for NFC."""
    first, last = model.get("pre_tokenizer"), model.get("decoder") or {}
    steps = (first or {}).get("pretokenizers", [first])
    kinds = {(step or {}).get("type") for step in steps}
    return (
        model.get("model", {}).get("type") == "BPE"
        and (model.get("normalizer") or {}).get("type", "NFC") == "NFC"
        and last.get("type") == "ByteLevel"
        and "ByteLevel" in kinds
        and kinds <= {"ByteLevel", "Split", "Digits"}
        and not any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
    )


def _as_str(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode()


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.replace("\n", f" {EOS} "))


def _ranked(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))
