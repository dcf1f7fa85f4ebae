import gzip
import json
import re
from contextlib import closing

import pytest
import soundfile

from lit_effattn.datamodules import Filterbanks, ManifestCorpus, SpeechData, read_audio
from lit_effattn.datamodules.speech.espeak import Speaker, Synthesizer
from lit_effattn.datamodules.speech.phonemes import ESPEAK_PHONES
from scripts.asterisk_prompts import FOLDING, SOUNDS, TO_ESPEAK, TRANSCRIPTS, main
from tests.support.commands import REPOSITORY

RECORDINGS = REPOSITORY / "tests" / "recordings"
TEXTS = """; Core Sounds

clubs: Ten of clubs.
digits/5: 5, "Five"... [said twice]
letters/a: a
time: A.M.,  re-ten (or so)
beep: [a tone]
moon: Ten moons, of 55
gone: Ten.
"""
LEXICON = """ten T EH1 N
of AH1 V
of(2) AH0 V
clubs K L AH1 B Z
five F AY1 V
a AH0
a. EY1
a.m. EY2 EH1 M
re R AH0
"""


@pytest.fixture
def package(tmp_path):
    """Prompts as in the packages, 8 kHz, of two real recordings."""
    (tmp_path / TRANSCRIPTS).parent.mkdir(parents=True)
    (tmp_path / TRANSCRIPTS).write_bytes(gzip.compress(TEXTS.encode()))
    (tmp_path / "words.dict").write_text(LEXICON)
    sounds = tmp_path / SOUNDS
    for name in ("clubs", "digits/5", "letters/a", "time", "beep", "moon"):
        path = sounds / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        recording = "five_five.wav" if name == "digits/5" else "ten_of_clubs.wav"
        soundfile.write(path, read_audio(RECORDINGS / recording, sample_rate=8000).numpy(), 8000)
    return tmp_path


@pytest.fixture
def made(package, capsys):
    main([str(package), str(package / "out"), "--lexicon", str(package / "words.dict")])
    return package / "out", capsys.readouterr().out


def test_prompts_have_the_phones_of_their_words(made):
    out, output = made
    lines = [json.loads(line) for line in (out / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["id"]: " ".join(line["phonemes"]) for line in lines} == {
        "clubs": "t ɛ n ʌ v k l ʌ b z",
        "digits/5": "f aɪ v f aɪ v",
        "letters/a": "eɪ",
        "time": "eɪ ɛ m ɹ ə t ɛ n",
    }
    assert "test: 4 prompts, 0.1 minutes, 25 phones" in output
    assert "3 prompts are left out:" in output
    for reason in ("1 without words:\n    beep", "1 with unknown words:\n    moon: MOONS, 55", "1 without a recording"):
        assert reason in output


def test_the_prompts_are_a_test_split_of_speech_data(made):
    out, _ = made
    manifest = str(out / "test.jsonl")
    train = out / "train.jsonl"
    train.write_text(json.dumps({"audio_filepath": "wav/clubs.wav", "phonemes": list(ESPEAK_PHONES)}) + "\n")
    corpus = ManifestCorpus(str(train), manifest, manifest, folding=str(out / "folding.json"))
    assert corpus.phones == ESPEAK_PHONES
    data = SpeechData(corpus, upsample=True, normalize=None, cache_dir=str(out / "cache"))
    data.prepare_data()
    data.setup("test")
    (batch,) = data.test_dataloader()
    five = batch.features[batch.ids.index("test/digits/5")]
    wide = Filterbanks()(read_audio(RECORDINGS / "five_five.wav"))
    narrow = five[: len(wide)]
    assert abs(len(wide) - int(batch.lengths.max())) <= 1
    # The filters of mel(f) = 1127 ln(1 + f / 700) up to 3500 Hz, 29 of 40, are those of the wide band; those from
    # 4300 Hz, the last 9, are nearly empty.
    loud = wide > wide.mean()
    assert (narrow - wide)[:, 2:29][loud[:, 2:29]].abs().mean() < 0.3
    assert (wide - narrow)[:, 31:][loud[:, 31:]].mean() > 3


def test_the_phones_are_those_of_the_recogniser():
    assert set(TO_ESPEAK.values()) | {*FOLDING, *FOLDING.values()} <= set(ESPEAK_PHONES)
    assert not set(FOLDING.values()) & set(FOLDING)
    assert len(TO_ESPEAK) == 24 + 3 * 15
    reached = {FOLDING.get(phone, phone) for phone in TO_ESPEAK.values()}
    assert reached == {FOLDING.get(phone, phone) for phone in ESPEAK_PHONES}


WORDS = """trap T R AE1 P, lot L AA1 T, thought TH AO1 T, strut S T R AH1 T, mouth M AW1 TH, price P R AY1 S,
dress D R EH1 S, nurse N ER1 S, face F EY1 S, kit K IH1 T, fleece F L IY1 S, choice CH OY1 S, foot F UH1 T,
goose G UW1 S, goat G OW1 T, this DH IH1 S, judge JH AH1 JH, vision V IH1 ZH AH0 N, sing S IH1 NG, ship SH IH1 P,
win W IH1 N, yes Y EH1 S, buzz B AH1 Z, hug HH AH1 G, dim D IH1 M"""


def test_the_american_voice_says_words_so():
    pytest.importorskip("espeakng_loader")
    with closing(Synthesizer()) as voice:
        for word, *phones in (entry.split() for entry in WORDS.split(",")):
            phonemes = voice.say(Speaker("en-us+m1", 160, 50), word).phones
            assert phonemes == [TO_ESPEAK[phone] for phone in phones], word


def test_a_folder_without_the_packages_is_named(package):
    (package / TRANSCRIPTS).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{package / TRANSCRIPTS}: is missing; unpack both")):
        main([str(package), str(package / "out"), "--lexicon", str(package / "words.dict")])
