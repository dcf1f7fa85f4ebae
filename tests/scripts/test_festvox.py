import hashlib
from pathlib import Path

import pytest

from lit_effattn.datamodules import ManifestCorpus
from scripts.festvox import main, read_labels

HEADER = "separator ;\nnfields 1\n"
LABELS = HEADER + "#\n 0.30000 125 pau ;\n0.40000 125 k\n0.55 125 ay\n0.7 125 pau\n0.8 125 H#\n0.9 125 k\n"


def voice(root: Path, n: int = 20) -> Path:
    """A folder like that of festvox-ru: recordings 1 and n + 1 are of one sentence."""
    for folder in ("wav", "lab", "etc"):
        (root / folder).mkdir(parents=True)
    names = [f"ru_{i:04}" for i in range(1, n + 2)]
    for name in names:
        (root / "wav" / f"{name}.wav").touch()
        (root / "lab" / f"{name}.lab").write_text(LABELS[len(HEADER) * (name < "ru_0010") :])  # or without a header
    lines = [f'( {name} "Предложение, {i % n}, вол+ос." )' for i, name in enumerate(names)]
    (root / "etc" / "txt.done.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def corpus(root: Path, *args: str) -> ManifestCorpus:
    main([str(root), *args])
    return ManifestCorpus(*(str(root / f"{split}.jsonl") for split in ("train", "val", "test")))


def test_the_splits_share_no_sentence_and_are_fixed(tmp_path: Path):
    sentences = [f"Предложение, {i}, вол+ос." for i in range(20)]
    voice(tmp_path)
    seen = set()
    for seed in range(40):
        order = sorted(range(20), key=lambda i: hashlib.sha256(f"{seed} {sentences[i]}".encode()).digest())
        chosen = {"test": order[:2], "val": order[2:4], "train": order[4:]}
        made = corpus(tmp_path, "--seed", str(seed))
        for split, numbers in chosen.items():
            names = sorted([f"ru_{i + 1:04}" for i in numbers] + ["ru_0021"] * (0 in numbers))  # 1 and 21 are of one
            assert [u.id for u in made.utterances(split)] == [f"{split}/{name}" for name in names]
            seen |= {split} if "ru_0021" in names else set()
    assert seen == {"train", "val", "test"}


def test_phones_times_and_pauses(tmp_path: Path):
    """The voice may be deeper in the folder; a recording without labels is left out."""
    (voice(tmp_path / "usr" / "share" / "nsh") / "lab" / "ru_0005.lab").unlink()
    plain = [u for split in ("train", "val", "test") for u in corpus(tmp_path).utterances(split)]
    assert len(plain) == 20
    first = next(u for u in plain if u.id.endswith("ru_0004"))
    assert (first.audio, first.speaker) == (tmp_path / "usr/share/nsh/wav/ru_0004.wav", "nsh")
    assert {u.phones for u in plain} == {("k", "ay", "k")}
    assert '"times": [[0.3, 0.4], [0.4, 0.55], [0.8, 0.9]]' in (tmp_path / "train.jsonl").read_text()
    assert corpus(tmp_path, "--pauses").utterances("train")[0].phones == ("pau", "k", "ay", "pau", "k")
    assert "[0.55, 0.8]" in (tmp_path / "train.jsonl").read_text()  # two pauses are one
    voice(tmp_path / "usr" / "share" / "other")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])


def test_invalid_files(tmp_path: Path):
    for labels, message in {
        "0.3 125 pau\n": "has no line '#'",
        "a\n#\n0.3 pau\n": r"x\.lab:3: '0\.3 pau' is not like",
        "a\n#\n\n0.3 125 a\nnan 125 b\n": r"x\.lab:5: the phone ends at nan s, but begins at 0\.3 s",
        "a\n#\n0.3 125 a\n0.2 125 b\n": r"x\.lab:4: the phone ends at 0\.2 s, but begins at 0\.3 s",
    }.items():
        (tmp_path / "x.lab").write_text(labels)
        with pytest.raises(ValueError, match=message):
            read_labels(tmp_path / "x.lab")
    path = voice(tmp_path / "voice") / "etc" / "txt.done.data"
    whole = path.read_text()
    for line, message in {
        "ru_0001 Sentence.": r"txt\.done\.data:22: .* is not like",
        '( ../../secret "Sentence." )': "is not like",
        '( ru_0003 "Sentence." )': r"txt\.done\.data:22: .* names a recording again",
    }.items():
        path.write_text(whole + line)
        with pytest.raises(ValueError, match=message):
            main([str(tmp_path / "voice")])
    path.write_bytes(whole.encode("koi8-r"))
    with pytest.raises(ValueError, match=r"txt\.done\.data: it is not utf-8 .*; save it as UTF-8"):
        main([str(tmp_path / "voice")])
    (tmp_path / "x.lab").write_bytes("#\n0.3 125 ä\n0.5 125 ö\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"x\.lab: it is not utf-8"):
        read_labels(tmp_path / "x.lab")
    path.write_text('( a "One." )\n( b "Two." )\n')
    with pytest.raises(ValueError, match="has fewer than three different sentences"):
        main([str(tmp_path / "voice")])
