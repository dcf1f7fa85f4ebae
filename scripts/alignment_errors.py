"""Compare the times of recognised phones with the true ones of a festvox voice.

    lit-effattn predict --ckpt_path best             # writes transcripts.jsonl
    python -m scripts.alignment_errors transcripts.jsonl data/festvox-ru

Recognised and true phones are matched by difflib's longest common blocks; pauses are left out. Of each matched phone,
the errors of its start, its middle and its end are recognised minus true, in milliseconds. A CTC model emits a phone in
a few frames somewhere within it, so its errors have a constant part, the shift (their median). The table has, for each
time, the shift, and the mean and the 90 % quantile of the absolute errors before and after it is subtracted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_effattn.datamodules.speech.festvox import PAUSE, FestvoxCorpus, Segment

TIMES = ("start", "middle", "end")


class Matches(NamedTuple):
    """The matched phones of recordings.

    Attributes:
        errors: (n, 3), recognised minus true start, middle and end, in seconds.
        inside: (n,), whether the middle of the recognised phone lies within the true one.
        n_true: Number of true phones.
    """

    errors: np.ndarray
    inside: np.ndarray
    n_true: int


def match(recognised: Sequence[Segment], true: Sequence[Segment]) -> Matches:
    """Match the phones of one recording."""
    true = [segment for segment in true if segment.phone != PAUSE]
    recognised = [segment for segment in recognised if segment.phone != PAUSE]
    names = [s.phone for s in recognised], [s.phone for s in true]
    blocks = SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    pairs = [(recognised[a + i], true[b + i]) for a, b, size in blocks for i in range(size)]
    of_pairs = np.array([(times(r), times(t)) for r, t in pairs]).reshape(-1, 2, 3)
    got, wanted = of_pairs[:, 0], of_pairs[:, 1]
    inside = (got[:, 1] >= wanted[:, 0]) & (got[:, 1] <= wanted[:, 2])
    return Matches(got - wanted, inside, len(true))


def times(segment: Segment) -> tuple[float, float, float]:
    """Return start, middle and end."""
    return segment.start, (segment.start + segment.end) / 2, segment.end


def matches(transcripts: Path, corpus: FestvoxCorpus) -> Matches:
    """Match the phones of all recordings of `transcripts`, which `lit-effattn predict` wrote.

    Raises:
        ValueError: If no phone matches.
    """
    lines = [json.loads(line) for line in transcripts.read_text(encoding="utf-8").splitlines()]
    matched = [
        match([Segment(p["phone"], p["start"], p["end"]) for p in line["phones"]], corpus.segments(line["id"]))
        for line in lines
    ]
    errors = np.concatenate([m.errors for m in matched]) if matched else np.zeros((0, 3))
    if not len(errors):
        raise ValueError(f"{transcripts}: no recognised phone matches a true one; is it of this voice?")
    return Matches(errors, np.concatenate([m.inside for m in matched]), sum(m.n_true for m in matched))


def table(matched: Matches) -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = [
        f"{len(matched.errors):,} of {matched.n_true:,} phones matched; the middle of {matched.inside.mean():.1%} lies "
        "within the true phone",
        "| time | shift, ms | mean error, ms | 90 % | mean without the shift | 90 % |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, errors in zip(TIMES, 1000 * matched.errors.T, strict=True):
        shift = np.median(errors)
        figures = [f(abs(e)) for e in (errors, errors - shift) for f in (np.mean, lambda x: np.quantile(x, 0.9))]
        lines.append(f"| {name} | {shift:+.0f} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")
    return lines


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        "alignment_errors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("transcripts", type=Path, help="transcripts.jsonl of `lit-effattn predict`.")
    parser.add_argument("root", help="Folder of the voice: see FestvoxCorpus.")
    given = parser.parse_args(args)
    print(*table(matches(given.transcripts, FestvoxCorpus(given.root))), sep="\n")


if __name__ == "__main__":
    main()
