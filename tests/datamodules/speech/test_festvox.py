import hashlib
import json
from pathlib import Path

import pytest

from lit_effattn.datamodules import FestvoxCorpus
from lit_effattn.datamodules.speech.festvox import Segment, read_labels

LABELS = (
    "separator ;\nnfields 1\n#\n 0.30000 125 pau ;\n0.40000 125 k\n0.55 125 ay\n0.7 125 pau\n0.8 125 H#\n0.9 125 k\n"
)


def voice(root: Path, n: int = 20, labels: str = LABELS) -> Path:
    """A folder like that of festvox-ru: recordings 1 and n + 1 are of one sentence."""
    for folder in ("wav", "lab", "etc"):
        (root / folder).mkdir(parents=True)
    names = [f"ru_{i:04}" for i in range(1, n + 2)]
    for name in names:
        (root / "wav" / f"{name}.wav").touch()
        (root / "lab" / f"{name}.lab").write_text(labels)
    lines = [f'( {name} "Предложение, {i % n}, вол+ос." )' for i, name in enumerate(names)]
    (root / "etc" / "txt.done.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def ids(corpus: FestvoxCorpus) -> dict[str, list[str]]:
    return {split: [u.id for u in corpus.utterances(split)] for split in ("train", "val", "test")}


def test_the_splits_share_no_sentence_and_are_fixed(tmp_path: Path):
    sentences = [f"Предложение, {i}, вол+ос." for i in range(20)]
    root, seen = str(voice(tmp_path)), set()
    for seed in range(40):
        order = sorted(range(20), key=lambda i: hashlib.sha256(f"{seed} {sentences[i]}".encode()).digest())
        chosen = {"test": order[:2], "val": order[2:4], "train": order[4:]}
        names = {
            split: sorted([f"ru_{i + 1:04}" for i in numbers] + ["ru_0021"] * (0 in numbers))  # 1 and 21 are of one
            for split, numbers in chosen.items()
        }
        assert ids(FestvoxCorpus(root, seed=seed)) == names
        assert seed or ids(FestvoxCorpus(root)) == names
        seen |= {split for split in names if "ru_0021" in names[split]}
    assert seen == {"train", "val", "test"}


def test_another_voice_is_the_test_split(tmp_path: Path):
    root = str(voice(tmp_path / "nsh"))
    lines = [{"audio_filepath": f"{i}.wav", "id": i, "phonemes": "k ay"} for i in "ba"]
    manifest = tmp_path / "test.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    corpus, own = FestvoxCorpus(root, test=str(manifest)), FestvoxCorpus(root)
    assert [(u.id, u.audio, u.phones) for u in corpus.utterances("test")] == [
        (i, tmp_path / f"{i}.wav", ("k", "ay")) for i in "ab"
    ]
    assert [ids(corpus)[split] == ids(own)[split] for split in ("train", "val", "test")] == [True, True, False]
    assert corpus.phones == own.phones
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        FestvoxCorpus(root, test=str(tmp_path / "gone.jsonl")).prepare()
    with pytest.raises(ValueError, match="test='' names no manifest"):
        FestvoxCorpus(root, test="")


def test_an_utterance_and_its_times(tmp_path: Path):
    corpus = FestvoxCorpus(str(voice(tmp_path / "nsh")))
    utterance = next(u for split in ("train", "val", "test") for u in corpus.utterances(split) if u.id == "ru_0004")
    assert utterance.audio == tmp_path / "nsh" / "wav" / "ru_0004.wav"
    assert utterance.speaker == "nsh"
    assert corpus.segments("ru_0004") == [
        Segment("pau", 0.0, 0.3),
        Segment("k", 0.3, 0.4),
        Segment("ay", 0.4, 0.55),
        Segment("pau", 0.55, 0.7),
        Segment("pau", 0.7, 0.8),  # h#
        Segment("k", 0.8, 0.9),
    ]


@pytest.mark.parametrize(
    ("pauses", "spoken", "folded"),
    [
        ("delete", ("k", "ay", "k"), ("ay", "k")),
        ("unscored", ("pau", "k", "ay", "pau", "k"), ("ay", "k", "")),
        ("scored", ("pau", "k", "ay", "pau", "k"), ("ay", "k", "pau")),
    ],
)
def test_pauses(tmp_path: Path, pauses, spoken, folded):
    corpus = FestvoxCorpus(str(voice(tmp_path)), pauses=pauses)
    assert corpus.utterances("train")[0].phones == spoken
    assert corpus.folded == folded


def test_the_voice_may_lie_deeper_but_be_only_one(tmp_path: Path):
    voice(tmp_path / "usr" / "share" / "nsh")
    FestvoxCorpus(str(tmp_path)).prepare()
    voice(tmp_path / "usr" / "share" / "other")
    with pytest.raises(ValueError, match=r"has 2 voices; name one, such as .*nsh"):
        FestvoxCorpus(str(tmp_path)).prepare()


def test_a_missing_voice_is_described(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"apt-get download festvox-ru && dpkg-deb --extract .*deb\.debian\.org"
    ):
        FestvoxCorpus(str(tmp_path)).prepare()


def test_a_recording_without_labels_has_no_phones(tmp_path: Path):
    for path in (voice(tmp_path) / "lab").glob("ru_000*.lab"):
        path.unlink()
    corpus = FestvoxCorpus(str(tmp_path))
    phones = {u.id: u.phones for split in ("train", "val", "test") for u in corpus.utterances(split)}
    assert {name for name in phones if phones[name] is None} == {f"ru_000{i}" for i in range(1, 10)}
    assert corpus.phones == ("ay", "k")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("0.3 125 pau\n", "has no line '#'"),
        ("#\n0.3 pau\n", r"x\.lab:2: '0\.3 pau' is not like"),
        ("#\n\n0.3 125 a\nnan 125 b\n", r"x\.lab:4: the segment ends at nan s, but begins at 0\.3 s"),
        ("#\n0.3 125 a\n0.2 125 b\n", r"x\.lab:3: the segment ends at 0\.2 s, but begins at 0\.3 s"),
    ],
)
def test_invalid_labels(tmp_path: Path, labels: str, message: str):
    (tmp_path / "x.lab").write_text(labels)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / "x.lab")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ru_0001 Sentence.", r"txt\.done\.data:22: .* is not like"),
        ('( ../../secret "Sentence." )', "is not like"),
        ('( ru_0003 "Sentence." )', "'ru_0003' occurs twice"),
    ],
)
def test_invalid_sentences(tmp_path: Path, line: str, message: str):
    with (voice(tmp_path) / "etc" / "txt.done.data").open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=message):
        FestvoxCorpus(str(tmp_path)).prepare()


def test_two_sentences_can_not_be_divided(tmp_path: Path):
    with pytest.raises(ValueError, match="has fewer than three different sentences"):
        FestvoxCorpus(str(voice(tmp_path, n=2))).prepare()


def test_invalid_options():
    with pytest.raises(ValueError, match="pauses='keep' is unknown; choose delete, unscored or scored"):
        FestvoxCorpus(pauses="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=-1"):
        FestvoxCorpus(seed=-1)
