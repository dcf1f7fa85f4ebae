import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import soundfile

from lit_effattn.datamodules import FestvoxCorpus, SpeechData, read_audio
from scripts.asterisk_russian import SOUNDS, TRANSCRIPTS, main, pronounce
from tests.datamodules.speech.test_festvox import voice
from tests.support.commands import REPOSITORY

TEXTS = """; Core Sounds

hours: Ч"\\асов.
digits/1: 1 (один) ...
again: .Час
beep: [a tone]
latin: Asterisk это
gone: Час.
"""

# Stands for festival, which is not on every machine: a sound of every letter, between pauses.
PROGRAM = r"""
import pathlib, re, sys
for text in re.findall(r'^\(phones "([^"]*)"\)$', pathlib.Path(sys.argv[-1]).read_text(encoding="utf-8"), re.M):
    sounds = {"ч": "ch", "а": "aa", "с": "s", "о": "oo", "в": "f", "1": "a d ii n"}
    assert set(text.lower()) <= {*sounds, " ", "."}, text
    print("phones: pau", *(sounds[c] for c in text.lower() if c in sounds), "pau")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / TRANSCRIPTS).parent.mkdir(parents=True)
    (tmp_path / TRANSCRIPTS).write_bytes(gzip.compress(TEXTS.encode()))
    for name in ("hours", "digits/1", "again", "beep", "latin"):
        path = tmp_path / SOUNDS / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = read_audio(REPOSITORY / "tests/recordings/five_five.wav", sample_rate=8000)
        soundfile.write(path, samples.numpy(), 8000)
    (tmp_path / "festival.py").write_text(PROGRAM, encoding="utf-8")
    program = tmp_path / "festival"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "festival.py"}" "$@"\n')
    program.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_the_prompts_are_a_test_split_of_the_voice(package: Path, capsys: pytest.CaptureFixture[str]):
    out = package / "out"
    main([str(package), str(out), "--festival", str(package / "festival")])
    output = capsys.readouterr().out
    assert re.match(r"test: 3 prompts, 0\.1 minutes, 12 phones\n3 prompts are left out:", output)
    for reason in ("1 without words:\n    beep", "1 with Latin letters:\n    latin", "1 without a recording"):
        assert reason in output
    lines = [json.loads(line) for line in (out / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["id"]: " ".join(line["phonemes"]) for line in lines} == {
        "hours": "ch aa s oo f",
        "digits/1": "a d ii n",
        "again": "ch aa s",
    }
    inventory = "".join(f"{i}.0 125 {p}\n" for i, p in enumerate(["aa", "a", "ch", "d", "ii", "n", "s", "oo", "f"]))
    root = voice(package / "voice", labels=f"#\n{inventory}")
    data = SpeechData(
        FestvoxCorpus(str(root), test=str(out / "test.jsonl")), upsample=True, normalize=None, cache=False
    )
    data.prepare_data()
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert sorted(batch.ids) == ["again", "digits/1", "hours"]


@pytest.mark.skipif(shutil.which("festival") is None, reason="needs festival with the voice of festvox-ru")
def test_festival_pronounces():
    try:
        assert pronounce(["Нажмите 1."], ["festival"]) == [
            ["n", "a", "zh", "mm", "ii", "tt", "ae", "a", "dd", "ii", "n"]
        ]
    except RuntimeError as error:
        pytest.skip(str(error))


def test_what_is_missing(package: Path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such program; apt-get install festival"):
        main([str(package), str(package / "out"), "--festival", "nowhere"])
    with pytest.raises(FileNotFoundError, match="is missing; unpack both packages"):
        main([str(package / "out"), str(package / "out")])
    with pytest.raises(RuntimeError, match="0 of 1 texts; apt-get install festival festvox-ru"):
        pronounce(["Час"], [sys.executable, "-c", "0"])
