"""Manifests of a voice in festvox's layout, wav/NAME.wav, lab/NAME.lab and etc/txt.done.data, for `ManifestCorpus`.

    mkdir -p data && apt-get download festvox-ru && dpkg-deb --extract festvox-ru_*.deb data/festvox-ru
    python -m scripts.festvox data/festvox-ru

Debian's festvox-ru: 620 Russian sentences, 99.5 minutes at 16 kHz, one human voice, 50 phones (Shmyrev 2005, BSD-like
licence, 179 MB). Without these programs, download festvox-ru_0.5+dfsg-6_all.deb from
https://deb.debian.org/debian/pool/main/f/festvox-ru/, unpack it by `ar x`, and the data.tar.xz in it by tar.

The command writes train.jsonl, val.jsonl and test.jsonl into the folder: file, text, phonemes and their times in
seconds. The splits share no sentence: the distinct sentences are sorted by the SHA-256 of "SEED SENTENCE"; the first
tenth is for test, the second for validation, the rest for training. Recordings without a label file are left out.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from lit_effattn.datamodules.common.files import read_text
from lit_effattn.datamodules.common.splits import fixed_order
from scripts import documented_parser

_PAUSES = {"pau", "h#", "#", "sil", "ssil", "brth"}
_SENTENCE = re.compile(r'\s*\(\s*([^\s/\\]+)\s+"(.*)"\s*\)\s*')


def read_sentences(path: Path) -> dict[str, str]:
    """Return the sentence of each recording, from lines such as `( ru_0001 "A sentence." )`.

    Raises:
        ValueError: If a line is invalid, a name occurs twice, or the file is not UTF-8.
    """
    sentences: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            match = _SENTENCE.fullmatch(line)
            if match is None or match[1] in sentences:
                fault = "is not like '( ru_0001 \"A sentence.\" )'" if match is None else "names a recording again"
                raise ValueError(f"{path}:{number}: {line!r} {fault}; correct it")
            sentences[match[1]] = match[2]
    return sentences


def read_labels(path: Path) -> list[tuple[str, float, float]]:
    """Return the phones of a label file with start and end in seconds: a header, which may be empty, `#`, then
    lines `0.342 125 pau`.

    The number is the end of the phone; the next field is a colour, which is ignored. Pauses are `pau`.

    Raises:
        ValueError: If a line is invalid, a phone ends before it begins, or the file is not UTF-8.
    """
    lines = read_text(path).splitlines()
    segments: list[tuple[str, float, float]] = []
    if "#" not in lines:
        raise ValueError(f"{path}: has no line '#', which ends the header; add it")
    begin = lines.index("#") + 1
    for number, line in enumerate(lines[begin:], begin + 1):
        if line.strip():
            start = segments[-1][2] if segments else 0.0
            try:
                time, _, label, *_ = line.split()
                end = float(time)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {line!r} is not like '0.342 125 pau'; correct it") from error
            if not (math.isfinite(end) and end >= start):
                raise ValueError(f"{path}:{number}: the phone ends at {time} s, but begins at {start} s; correct it")
            segments.append(("pau" if label.lower() in _PAUSES else label, start, end))
    return segments


def manifests(voice: Path, *, seed: int, pauses: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of the manifest of each split, with file names relative to `voice`, sorted by name.

    Raises:
        ValueError: If a line is invalid, or there are fewer than three different sentences.
    """
    sentences = read_sentences(voice / "etc" / "txt.done.data")
    distinct = sorted(set(sentences.values()))
    if len(distinct) < 3:
        raise ValueError(f"{voice}: has fewer than three different sentences, one for each split; add some")
    order, held_out = fixed_order(f"{seed} {sentence}" for sentence in distinct), max(1, len(distinct) // 10)
    splits = {distinct[i]: "test" if rank < held_out else "val" for rank, i in enumerate(order[: 2 * held_out])}
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": []}
    for name, text in sorted(sentences.items()):
        if not (labels := voice / "lab" / f"{name}.lab").exists():
            continue
        # Consecutive pauses are one.
        merged: list[tuple[str, float, float]] = []
        for phone, start, end in read_labels(labels):
            if phone == "pau" and merged and merged[-1][0] == "pau":
                start = merged.pop()[1]
            merged.append((phone, start, end))
        spoken = [segment for segment in merged if pauses or segment[0] != "pau"]
        entry = {"audio_filepath": f"wav/{name}.wav", "id": name, "speaker": voice.name, "text": text}
        times = [[start, end] for _, start, end in spoken]
        lines[splits.get(text, "train")].append(entry | {"phonemes": [p for p, *_ in spoken], "times": times})
    return lines


def main(args: list[str] | None = None) -> None:
    """Write the manifests and print the number of recordings in each."""
    parser = documented_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the voice, or one that contains it")
    parser.add_argument("--pauses", action="store_true", help="keep pauses, as the phone pau")
    parser.add_argument("--seed", type=int, default=0, help="seed of the splits (default: %(default)s)")
    given = parser.parse_args(args)
    voices = [lab.parent for lab in (given.folder / "lab", *given.folder.rglob("lab")) if (lab.parent / "wav").is_dir()]
    if len(set(voices)) != 1:
        parser.error(f"{given.folder}: has {len(set(voices))} voices, folders with wav/, lab/ and etc/txt.done.data")
    for split, lines in manifests(voices[0], seed=given.seed, pauses=given.pauses).items():
        for line in lines:
            line["audio_filepath"] = str((voices[0] / line["audio_filepath"]).relative_to(given.folder))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (given.folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{split}: {len(lines):,} recordings")


if __name__ == "__main__":
    main()
