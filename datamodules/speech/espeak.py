"""Synthesis of a corpus of English speech with espeak-ng, labelled with the phones that espeak-ng reports.

python -m lit_effattn.datamodules.speech.espeak --help
"""

import argparse
import ast
import ctypes.util
import hashlib
import json
import math
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.cache import cached_folder
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.python_library import library_files
from lit_effattn.datamodules.common.splits import SPLITS, fixed_order
from lit_effattn.datamodules.speech.phonemes import espeak_phones

FORMAT = 1
"""Version of the corpus format. Increment it if the same arguments give different files."""

ESPEAK_MINUTES = 60.0
"""Default length of `EspeakCorpus` in minutes."""

SAMPLE_RATE = 16_000
ABOUT = "about.json"  # present if the corpus is complete

_SHARES = {"test": 0.1, "val": 0.1, "train": 0.8}  # of the minutes; sentences are assigned in this order
_DIALECTS = ("en", "en-029", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-gb-x-rp", "en-us", "en-us-nyc")
_VARIANTS = {  # of the voice
    "train": ("f1", "f3", "f5", "m1", "m2", "m4", "m5", "m7", "m8"),
    "val": ("f2", "m3"),
    "test": ("f4", "m6"),
}
_RATES = range(140, 201, 10)  # words per minute
_PITCHES = range(35, 66, 5)  # espeak-ng's scale is 0 to 99

_MIN_WORDS, _MAX_WORDS = 4, 12  # of an utterance: about 2 to 6 seconds


class Speaker(NamedTuple):
    """A voice with a fixed speed and pitch.

    Attributes:
        voice: espeak-ng's name: dialect and variant, as in en-us+m1.
        rate: Words per minute.
        pitch: 0 to 99.
    """

    voice: str
    rate: int
    pitch: int


class Spoken(NamedTuple):
    """A synthesised text.

    Attributes:
        samples: (n,) 16-bit integers at `SAMPLE_RATE`.
        phones: The spoken phones.
        times: Start and end of each phone, in seconds.
    """

    samples: np.ndarray
    phones: list[str]
    times: list[tuple[float, float]]


def speakers(split: str) -> list[Speaker]:
    """Return the speakers of a split in a fixed order: every dialect with each of the split's variants."""
    voices = [f"{dialect}+{variant}" for variant in _VARIANTS[split] for dialect in _DIALECTS]
    return [_speaker(voices[i]) for i in fixed_order(voices)]


def _speaker(voice: str) -> Speaker:
    digest = hashlib.sha256(voice.encode()).digest()
    return Speaker(voice, _RATES[digest[0] % len(_RATES)], _PITCHES[digest[1] % len(_PITCHES)])


# ---------------------------------------------------------------------------------------------------------- sentences


def library_sentences() -> list[list[str]]:
    """Collect the sentences in the documentation of the running Python and its library, cut into pieces of plain words.

    Returns:
        The pieces of each sentence, in a fixed order. No piece occurs twice.
    """
    sentences = {sentence for text in _documentation() for sentence in sentences_of(text)}
    order, seen, result = sorted(sentences), set[str](), []
    for sentence in (order[i] for i in fixed_order(order)):
        pieces = [piece for piece in cut(sentence) if piece not in seen]
        seen.update(pieces)
        if pieces:
            result.append(pieces)
    return result


def _documentation() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in library_files(root):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # deliberate, in inputs of tests and of translators of old code
            continue
        yield from docstrings(tree)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions; "" for those without."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of at least four plain words that end with a full stop, without punctuation."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.:;?!])\s+", paragraph.strip()):
            words = re.sub(r"[,;]", " ", sentence[:-1]).split()
            if not sentence.endswith(".") or len(words) < _MIN_WORDS:
                continue
            words[0] = words[0][0].lower() + words[0][1:]
            if all(re.fullmatch(r"[a-z]+('[a-z]+)?|I|Python", word) for word in words):
                yield " ".join(words)


def cut(sentence: str) -> list[str]:
    """Cut a sentence into as few pieces of at most twelve words as possible, with lengths as equal as possible."""
    words = sentence.split()
    n = math.ceil(len(words) / _MAX_WORDS)
    borders = [len(words) * i // n for i in range(n + 1)]
    return [" ".join(words[borders[i] : borders[i + 1]]) for i in range(n)]


# ----------------------------------------------------------------------------------------------------------- speaking


def espeak_library() -> tuple[str, str | None]:
    """Return the path of espeak-ng's library and the folder of its data; None: the library's default folder.

    The library of the package `espeakng-loader` takes precedence over the system's.

    Raises:
        ModuleNotFoundError: If neither is installed. The message says how to install one.
    """
    if find_spec("espeakng_loader") is not None:
        import espeakng_loader

        return espeakng_loader.get_library_path(), str(Path(espeakng_loader.get_data_path()).parent)
    if (library := ctypes.util.find_library("espeak-ng")) is not None:
        return library, None
    raise ModuleNotFoundError(
        "speech is synthesised by espeak-ng, which is not installed: pip install 'lit-effattn[speech]', or on Debian "
        "and Ubuntu: apt install libespeak-ng1"
    )


class Synthesizer:
    """espeak-ng in a separate process, which `close` ends. The same texts in the same order give the same audio.

    Attributes:
        version: Version of espeak-ng.

    Raises:
        ModuleNotFoundError: If espeak-ng is not installed.
        ChildProcessError: If the process does not start.
    """

    def __init__(self) -> None:
        library, data = espeak_library()
        program = Path(__file__).with_name("espeak_process.py")
        command = [sys.executable, str(program), library, *([] if data is None else [data])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            hello = self._answer()
        except ChildProcessError:
            self.close()
            raise
        self.version: str = hello["version"]
        self._sample_rate: int = hello["sample_rate"]

    def say(self, speaker: Speaker, text: str) -> Spoken:
        """Synthesise `text`.

        Raises:
            ChildProcessError: If espeak-ng has no such voice, or the process has ended.
            ValueError: If espeak-ng reports a sound that `espeak_phones` does not know.
        """
        request = speaker._asdict() | {"text": text}
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError as error:
            raise ChildProcessError(f"the espeak-ng process ended before {text!r}") from error
        answer = self._answer()
        audio = np.frombuffer(self._answers.read(2 * answer["samples"]), np.int16)
        phones, times = timed_phones(answer["phones"], len(audio), self._sample_rate)
        return Spoken(_resampled(audio, self._sample_rate), phones, times)

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ChildProcessError(f"the espeak-ng process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildProcessError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()  # no more requests


def timed_phones(
    sounds: Iterable[tuple[str, int]], n_samples: int, sample_rate: int
) -> tuple[list[str], list[tuple[float, float]]]:
    """Convert espeak-ng's sounds to phones, with the start and end of each in seconds.

    A sound lasts until the next one, pauses included. A sound of two phones is halved. A final l or r may have length
    0, since it is the end of its vowel.

    Args:
        sounds: Names and first samples.
        n_samples: Total number of samples.
        sample_rate: Sampling rate in Hz.
    """
    sounds = list(sounds)
    phones, times = list[str](), list[tuple[float, float]]()
    for (name, start), (_, end) in pairwise([*sounds, ("", n_samples)]):
        of_sound = espeak_phones(name)
        phones.extend(of_sound)
        borders = [start + (end - start) * i / len(of_sound) for i in range(len(of_sound) + 1)] if of_sound else []
        times.extend((round(a / sample_rate, 4), round(b / sample_rate, 4)) for a, b in pairwise(borders))
    return phones, times


def _resampled(audio: np.ndarray, sample_rate: int) -> np.ndarray:
    from torchaudio.functional import resample

    # In float64 the order of summation, which differs between machines, does not change the 16-bit result.
    samples = resample(torch.from_numpy(audio.astype(np.float64)), sample_rate, SAMPLE_RATE)
    return samples.round().clamp(-(2**15), 2**15 - 1).to(torch.int16).numpy()


# ------------------------------------------------------------------------------------------------------------- corpus


def make_corpus(root: Path, minutes: float) -> None:
    """Make a corpus in a folder unless it exists: FLAC files, and a manifest for each split.

    Args:
        root: The folder.
        minutes: Minutes of audio: 80 % for training, 10 % for validation, 10 % for test.

    Raises:
        FileExistsError: If the folder has other files.
        ModuleNotFoundError: If espeak-ng is not installed.
        ValueError: If there are too few sentences for this length.
    """
    if not minutes > 0:
        raise ValueError(f"minutes={minutes:g} must be more than 0")
    cached_folder(root, partial(_make, minutes=minutes), partial(_is_made, minutes=minutes))


def _is_made(root: Path, minutes: float) -> bool:
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        about = parse_json(regular(root / ABOUT).read_text())
        settings = {"format": about["format"], "minutes": about["minutes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileExistsError(f"root={str(root)!r} has files that are not a corpus; name another folder") from error
    if settings != (expected := {"format": FORMAT, "minutes": minutes}):
        raise FileExistsError(
            f"root={str(root)!r} has a corpus of {settings} instead of {expected}; delete it or name another folder"
        )
    return True


def _make(folder: Path, minutes: float) -> None:
    about: dict[str, Any] = {"format": FORMAT, "minutes": minutes, "python": sys.version.split()[0]}
    rank_zero_info(f"Synthesising {minutes:g} minutes of speech with espeak-ng, once")
    with closing(Synthesizer()) as voice, progress_bar() as bar:
        about["espeak-ng"] = voice.version
        sentences = iter(library_sentences())  # after espeak-ng has started, since this takes seconds
        task = bar.add_task("Synthesising speech", total=minutes * 60)
        for split, share in _SHARES.items():
            seconds = share * minutes * 60
            about[split] = _make_split(folder, split, seconds, sentences, voice, partial(bar.advance, task))
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def _make_split(
    folder: Path,
    split: str,
    seconds: float,
    sentences: Iterator[list[str]],
    voice: Synthesizer,
    advance: Callable[[float], None],
) -> dict[str, float]:
    import soundfile

    (folder / split).mkdir()
    in_turn = speakers(split)
    n, n_phones, done = 0, 0, 0.0
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as manifest:
        while done < seconds:
            if (pieces := next(sentences, None)) is None:
                raise ValueError(
                    f"this Python's documentation gives only {done / 60:.0f} of the {seconds / 60:.0f} minutes of "
                    f"{split!r}; request fewer minutes"
                )
            for text in pieces:
                speaker = in_turn[n % len(in_turn)]
                spoken = voice.say(speaker, text)
                name = f"{split}/{n:05d}-{speaker.voice}.flac"
                soundfile.write(folder / name, spoken.samples, SAMPLE_RATE, subtype="PCM_16")
                duration = len(spoken.samples) / SAMPLE_RATE
                line = {
                    "audio_filepath": name,
                    "duration": round(duration, 4),
                    "text": text,
                    "phonemes": spoken.phones,
                    "times": spoken.times,
                    "speaker": speaker.voice,
                }
                manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
                n, n_phones, done = n + 1, n_phones + len(spoken.phones), done + duration
                advance(duration)
    return {"utterances": n, "minutes": round(done / 60, 2), "phones": n_phones, "phones/s": round(n_phones / done, 2)}


def main(arguments: list[str] | None = None) -> None:
    """Make a corpus from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_effattn.datamodules.speech.espeak",
        description="Synthesise a corpus of English speech, labelled with phones: 8 dialects, 13 variants of the "
        "voice, several speeds and pitches, sentences from the documentation of Python's library. Training, "
        "validation and test share no sentence and no variant. The same arguments give the same files.",
    )
    parser.add_argument("--root", default="data/espeak", help="folder to create (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=ESPEAK_MINUTES, help="of audio (default: %(default)g)")
    options = parser.parse_args(arguments)
    try:
        make_corpus(Path(options.root), options.minutes)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    about = json.loads((Path(options.root) / ABOUT).read_text())
    for split in SPLITS:
        print(f"{split:5}  " + "  ".join(f"{value} {name}" for name, value in about[split].items()))


if __name__ == "__main__":
    main()
