"""Synthesis of a corpus of English speech with espeak-ng, labelled with the phones that espeak-ng reports."""

import ast
import base64
import ctypes.util
import hashlib
import json
import math
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.python_library import library_files
from lit_effattn.datamodules.common.splits import fixed_order
from lit_effattn.datamodules.common.store import cached_folder
from lit_effattn.datamodules.speech.phonemes import espeak_phones

FORMAT = 1
"""Version of the corpus format. Increment it if the same arguments give different files."""

ESPEAK_MINUTES = 60.0  # default length of `EspeakCorpus` in minutes

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
    """A voice with a fixed speed and pitch."""

    voice: str  # espeak-ng's name: dialect and variant, as in en-us+m1
    rate: int  # words per minute
    pitch: int  # 0 to 99


class Spoken(NamedTuple):
    """A synthesised text."""

    samples: np.ndarray  # (n,) 16-bit integers at `SAMPLE_RATE`
    phones: list[str]
    times: list[tuple[float, float]]  # start and end of each phone, in seconds


def speakers(split: str) -> list[Speaker]:
    """Return the speakers of a split in a fixed order: every dialect with each of the split's variants."""
    voices = [f"{dialect}+{variant}" for variant in _VARIANTS[split] for dialect in _DIALECTS]
    digests = [hashlib.sha256(voice.encode()).digest() for voice in voices]
    return [
        Speaker(voices[i], _RATES[digests[i][0] % len(_RATES)], _PITCHES[digests[i][1] % len(_PITCHES)])
        for i in fixed_order(voices)
    ]


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
    """Yield the topics of `help`, and the docstrings of the library's modules, classes and functions."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for path in library_files(Path(sysconfig.get_paths()["stdlib"])):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # deliberate, in inputs of tests and of translators of old code
            continue
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

    Raises:
        ModuleNotFoundError: If espeak-ng is not installed.
    """

    version: str | None = None  # version of espeak-ng; None before the first text

    def __init__(self) -> None:
        library, data = espeak_library()
        program = Path(__file__).with_name("espeak_process.py")
        command = [sys.executable, str(program), library, *([] if data is None else [data])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, speaker: Speaker, text: str) -> Spoken:
        """Synthesise `text`.

        Raises:
            ChildProcessError: If espeak-ng does not start or has no such voice, or the process has ended.
            ValueError: If espeak-ng reports a sound that `espeak_phones` does not know.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with suppress(BrokenPipeError):  # the process has ended, perhaps with an answer
            requests.write(json.dumps(speaker._asdict() | {"text": text}).encode() + b"\n")
            requests.flush()
        answer = json.loads(answers.readline() or b"{}")
        if "audio" not in answer:
            ended = f"the espeak-ng process ended before {text!r}"
            raise ChildProcessError(answer.get("error", ended))
        self.version, rate = answer["version"], answer["sample_rate"]
        audio = np.frombuffer(base64.b64decode(answer["audio"]), np.int16)
        return Spoken(_resampled(audio, rate), *timed_phones(answer["phones"], len(audio), rate))

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            self._process.communicate()  # no more requests


def timed_phones(
    sounds: Iterable[tuple[str, int]], n_samples: int, sample_rate: int
) -> tuple[list[str], list[tuple[float, float]]]:
    """Convert espeak-ng's sounds, names and first samples, to phones, with the start and end of each in seconds.

    A sound lasts until the next one, pauses included. A sound of two phones is halved. A final l or r may have length
    0, since it is the end of its vowel.
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
    """Make a corpus in a folder unless it exists: FLAC files, and a manifest for each split. See `EspeakCorpus`."""
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
        sentences = iter(library_sentences())  # after espeak-ng was found, since this takes seconds
        task = bar.add_task("Synthesising speech", total=minutes * 60)
        for split, share in _SHARES.items():
            seconds = share * minutes * 60
            about[split] = _make_split(folder, split, seconds, sentences, voice, partial(bar.advance, task))
        about["espeak-ng"] = voice.version
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
                line = {"audio_filepath": name, "duration": round(duration, 4), "text": text}
                line |= {"phonemes": spoken.phones, "times": spoken.times, "speaker": speaker.voice}
                manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
                n, n_phones, done = n + 1, n_phones + len(spoken.phones), done + duration
                advance(duration)
    return {"utterances": n, "minutes": round(done / 60, 2), "phones": n_phones, "phones/s": round(n_phones / done, 2)}
