"""An unseen voice as a test set for recognisers of the `russian_*` configurations: the Russian prompts of Asterisk.

    apt-get install festival festvox-ru
    apt-get download asterisk-core-sounds-ru asterisk-core-sounds-ru-wav
    dpkg -x asterisk-core-sounds-ru_*.deb asterisk
    dpkg -x asterisk-core-sounds-ru-wav_*.deb asterisk
    python -m scripts.asterisk_russian asterisk data/asterisk-ru

The last command writes test.jsonl, a manifest, and the recordings that it names. Test a trained recogniser with them:

    lit-effattn test --ckpt_path best --data.corpus.test data/asterisk-ru/test.jsonl --data.upsample true

The prompts are read by another woman than festvox-ru's, at 8 kHz. They are under the licence CC-BY-SA 3.0. Phones are
those that festival gives the text with the dictionary and the rules of festvox-ru, which also made the labels of that
voice. Texts with Latin letters, and those without words (tones, silence), are left out and counted. The transcripts are
as they were published and were not corrected. The rules give every text one pronunciation; the speaker may use another
one, so that a perfect recogniser would have errors too.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.speech.festvox import PAUSE
from scripts import documented_parser
from scripts.asterisk_prompts import ASIDES, manifest_line, transcripts, write

SOUNDS = "usr/share/asterisk/sounds/ru_RU_f_IvrvoiceRU"
TRANSCRIPTS = "usr/share/doc/asterisk-core-sounds-ru/core-sounds-ru.txt.gz"
SPEAKER = "IvrvoiceRU"

_SPOKEN = re.compile("[0-9а-яё]", re.IGNORECASE)
_LATIN = re.compile("[a-z]", re.IGNORECASE)
_UNREAD = re.compile(r"[^0-9а-яёА-ЯЁ.,!?-]+|(?<![0-9а-яёА-ЯЁ])[.,!?]+")
"""What festival does not read: other characters, and punctuation that follows no word."""
_SCHEME = """\
(voice_msu_ru_nsh_clunits)
(Parameter.set 'Synth_Method 'None)
(define (phones text)
  (let ((utterance (utt.synth (eval (list 'Utterance 'Text text)))))
    (format t "phones:")
    (mapcar (lambda (segment) (format t " %s" (item.name segment))) (utt.relation.items utterance 'Segment))
    (format t "\\n")))
"""


def pronounce(texts: Sequence[str], festival: Sequence[str]) -> list[list[str]]:
    """Return the phones of each text, without pauses.

    Args:
        texts: Russian texts.
        festival: The command that starts festival.

    Raises:
        FileNotFoundError: If the program is missing.
        RuntimeError: If it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "phones.scm")
        calls = [f'(phones "{_UNREAD.sub(" ", text).strip()}")\n' for text in texts]
        script.write_text(_SCHEME + "".join(calls), encoding="utf-8")
        try:
            done = subprocess.run([*festival, "--batch", str(script)], capture_output=True, encoding="utf-8")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{festival[0]}: there is no such program; apt-get install festival festvox-ru"
            ) from error
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("phones:")]
    if len(lines) != len(texts):
        message = (done.stderr.strip().splitlines() or [f"{len(lines)} of {len(texts)} texts"])[0]
        raise RuntimeError(f"{' '.join(festival)}: {message}; apt-get install festival festvox-ru")
    return [[phone for phone in line if phone != PAUSE] for line in lines]


def prompts(root: Path, festival: Sequence[str]) -> tuple[list[dict[str, Any]], Faults]:
    """Return the manifest's lines of an unpacked package, and the prompts that are left out.

    Raises:
        FileNotFoundError: If the recordings, the transcripts or festival are missing.
        RuntimeError: If festival fails.
    """
    sounds, texts = root / SOUNDS, root / TRANSCRIPTS
    for path in (sounds, texts):
        if not path.exists():
            raise FileNotFoundError(f"{path}: is missing; unpack both packages into {root}")
    usable, faults = {}, Faults()
    for name, text in transcripts(texts).items():
        spoken = ASIDES.sub(" ", text)
        if not (sounds / f"{name}.wav").is_file():
            faults.add(Fault("without a recording", name))
        elif not _SPOKEN.search(spoken):
            faults.add(Fault("without words", f"{name}: {text}"))
        elif _LATIN.search(spoken):
            faults.add(Fault("with Latin letters", f"{name}: {text}"))
        else:
            usable[name] = text
    spoken = [ASIDES.sub(" ", text) for text in usable.values()]
    lines = [
        manifest_line(sounds / f"{name}.wav", name, text, phones, SPEAKER)
        for (name, text), phones in zip(usable.items(), pronounce(spoken, festival), strict=True)
    ]
    return lines, faults


def main(args: list[str] | None = None) -> None:
    """Write the test set, and print its size and what is left out."""
    parser = documented_parser(__doc__)
    parser.add_argument("root", type=Path, help="folder into which both packages were unpacked")
    parser.add_argument("out", type=Path, help="folder to write test.jsonl and wav/ to")
    parser.add_argument("--festival", default="festival", help="program (default: festival)")
    parser.add_argument("--datadir", help="festival's folder of data, if it is not the installed one")
    given = parser.parse_args(args)
    lines, faults = prompts(given.root, [given.festival, *(["--datadir", given.datadir] if given.datadir else [])])
    write(given.root / SOUNDS, given.out, lines, faults)


if __name__ == "__main__":
    main()
