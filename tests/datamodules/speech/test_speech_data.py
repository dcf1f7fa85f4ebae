import json
import math
import warnings
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import soundfile
import torch

from lit_effattn import LSTM
from lit_effattn.datamodules import (
    BLANK,
    AudioError,
    Filterbanks,
    SpecAugment,
    SpeechCorpus,
    SpeechData,
    Utterance,
    WaveAugment,
    read_audio,
)
from lit_effattn.datamodules.speech.corpora import EspeakCorpus
from lit_effattn.datamodules.speech.utterances import SpeechBatch
from lit_effattn.nn.front_ends import ConvSubsampling
from lit_effattn.tasks import SpeechRecognizer

PHONES = ("aa", "b", "k", "sil")
RATE = 8000
SIZES = {"train": 12, "val": 5, "test": 7}


class Tiny(SpeechCorpus):
    """Noise, said to be phones."""

    phones = PHONES
    folded: ClassVar = ("aa", "b", "b", "")

    def __init__(self, folder):
        self.folder = folder
        self.splits = {split: [self.make(split, i) for i in range(n)] for split, n in SIZES.items()}

    def make(self, split, i):
        rng = np.random.default_rng((sum(map(ord, split)), i))
        path = self.folder / split / f"{i}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = rng.uniform(-0.5, 0.5, int(RATE * rng.uniform(0.25, 0.6))) * (1 + i)
        soundfile.write(path, 0.1 * samples, RATE)
        phones = tuple(rng.choice(PHONES, rng.integers(1, 6)).tolist())
        return Utterance(f"{split}-{i}", path, speaker=f"s{i % 2}", phones=phones)

    def prepare(self):
        pass

    def utterances(self, split):
        return self.splits[split]


@pytest.fixture
def corpus(tmp_path):
    return Tiny(tmp_path / "corpus")


@pytest.fixture
def make(tmp_path, corpus):
    def make(stage=None, *, world=1, rank=0, corpus=corpus, model=None, **options):
        given = {"n_mels": 20, "sample_rate": RATE, "batch_frames": 120, "cache_dir": str(tmp_path / "cache")}
        data = SpeechData(corpus, **(given | options))
        sampler = {"num_replicas": world, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=sampler, lightning_module=model)
        if stage:
            data.setup(stage)
        return data

    return make


def rows_of(batches):
    """Every utterance's features and labels, without padding, which is checked."""
    rows = {}
    for batch in batches:
        assert isinstance(batch, SpeechBatch)
        assert batch.features.dtype == torch.float32
        assert batch.features.shape[:2] == (len(batch.ids), int(batch.lengths.max()))
        assert batch.phones.shape == (len(batch.ids), int(batch.phone_lengths.max()))
        for i, name in enumerate(batch.ids):
            n, m = int(batch.lengths[i]), int(batch.phone_lengths[i])
            assert not batch.features[i, n:].any()
            assert (batch.phones[i, m:] == BLANK).all()
            assert name not in rows
            rows[name] = batch.features[i, :n], batch.phones[i, :m].tolist()
    return rows


def filterbanks(utterance):
    return Filterbanks(RATE, n_mels=20)(read_audio(utterance.audio, sample_rate=RATE))


def test_batches_hold_the_features_and_labels_of_every_utterance(make, corpus):
    for cache, num_workers in ((False, 0), (True, 2)):
        data = make("fit", normalize=None, cache=cache, num_workers=num_workers)
        for split, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
            rows = rows_of(loader)
            assert set(rows) == {u.id for u in corpus.splits[split]}
            for u in corpus.splits[split]:
                features, labels = rows[u.id]
                assert torch.equal(features, filterbanks(u))
                assert [PHONES[label - 1] for label in labels] == list(u.phones)
            if num_workers:
                loader._iterator._shutdown_workers()
            else:
                assert max(batch.features.shape[0] * batch.features.shape[1] for batch in loader) <= 120


def test_what_the_model_needs_to_know_is_known_at_once(make):
    assert isinstance(SpeechData().corpus, EspeakCorpus)
    data = make()
    assert (data.n_mels, data.phones, data.folded) == (20, list(PHONES), ["aa", "b", "b", ""])
    assert data.frame_seconds == 0.01
    assert make(sample_rate=11_025).frame_seconds == 110 / 11_025


def normal(x, of):
    return (x - of.double().mean(0)) / of.double().std(0, correction=0)


def test_normalisation_is_over_what_is_said(make, corpus):
    test = {u.id: filterbanks(u) for u in corpus.splits["test"]}
    train = torch.cat([filterbanks(u) for u in corpus.splits["train"]])
    speakers = {who: torch.cat([test[u.id] for u in corpus.splits["test"] if u.speaker == who]) for who in ("s0", "s1")}

    def check(kind, over):
        rows = rows_of(make("test", normalize=kind).test_dataloader())
        for u in corpus.splits["test"]:
            assert (rows[u.id][0] - normal(test[u.id], over(u))).abs().max() < 1e-4, kind

    check("utterance", lambda u: test[u.id])
    check("speaker", lambda u: speakers[u.speaker])
    check("corpus", lambda u: train)
    corpus.splits["test"] = [u._replace(speaker=None) for u in corpus.splits["test"]]
    check("speaker", lambda u: test[u.id])  # who speaks is not known


def test_statistics_of_the_corpus_are_in_the_checkpoint(make, tmp_path, corpus):
    """A checkpoint of other labels or features is refused."""
    first = make("fit", normalize="corpus")
    torch.save(first.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    expected = rows_of(make("test", normalize="corpus").test_dataloader())
    corpus.splits["train"] = corpus.splits["train"][:3]
    with pytest.warns(match="normalize='utterance', but the checkpoint was trained with normalize='corpus'"):
        make().load_state_dict(state)
    data = make("test", normalize="corpus")
    data.load_state_dict(state)
    rows = rows_of(data.test_dataloader())
    data.setup("fit")  # a new run
    assert torch.equal(data.state_dict()["statistics"], make("fit", normalize="corpus").state_dict()["statistics"])
    assert expected
    assert all(torch.equal(rows[name][0], expected[name][0]) for name in expected)
    with pytest.raises(ValueError, match=r"trained on Filterbanks\(8000, n_mels=20.*n_mels=21"):
        make(n_mels=21).load_state_dict(state)
    corpus.phones = ("b", "aa", "k", "sil")
    with pytest.raises(ValueError, match="4 phones are aa b k sil, but the corpus's 4 are b aa k sil"):
        make().load_state_dict(state)


def test_what_cannot_be_used_is_left_out_and_named(make, corpus):
    """Training also leaves out what is too short for its phones; test says that what it leaves out is not scored."""
    utterances, test = corpus.splits["train"], corpus.splits["test"]
    utterances[0].audio.unlink()
    utterances[1].audio.write_bytes(b"")
    soundfile.write(utterances[2].audio, np.zeros((4000, 2)), RATE)
    utterances[3] = utterances[3]._replace(phones=("aa", "zz"))
    utterances[4].audio.write_bytes(b"no sound" * 9)
    soundfile.write(utterances[5].audio, np.zeros(RATE * 2), RATE)
    soundfile.write(utterances[6].audio, np.zeros(RATE // 2), RATE // 2)
    utterances[7] = utterances[7]._replace(phones=None)
    frames = len(filterbanks(utterances[8]))
    utterances[8] = utterances[8]._replace(phones=("aa", "b") * (frames // 2) + ("k", "k"))
    soundfile.write(utterances[9].audio, np.full(4000, 1e38), RATE, subtype="FLOAT")
    soundfile.write(utterances[10].audio, np.zeros(RATE), RATE)
    with pytest.warns(UserWarning, match="are left out") as record:
        data = make("fit", max_seconds=1.5, normalize="corpus")
    rows = rows_of(data.train_dataloader())
    assert {u.id for u in utterances[11:]} == set(rows)
    assert all(features.abs().max() < 10 for features, _ in rows.values())  # by statistics of what is used
    reasons = ["missing", "empty", "several channels", "unknown phone", "unreadable", "too long", "low sampling rate"]
    reasons += ["without phones", "shorter than its phones", "wrong scale", "silent"]
    assert [fault.reason for fault in data.left_out["train"]] == reasons
    (text,) = [str(w.message) for w in record]
    assert "train: 11 of 12 utterances are left out:" in text
    assert all(f"1 {reason}:" in text for reason in reasons)
    assert "'zz'" in text

    for u in test[:5]:
        u.audio.unlink()
    test[5] = test[5]._replace(phones=("zz",))
    with pytest.warns(UserWarning, match="are left out") as record:
        data = make("test")
    assert set(rows_of(data.test_dataloader())) == {test[6].id}
    (text,) = [str(w.message) for w in record]
    for words in ("test: 6 of 7 utterances are left out, and are not in the score", "5 missing:", "and 2 more"):
        assert words in text
    assert "test/2.wav: there is no such file" in text
    assert "test/3.wav" not in text
    assert "test-5: 'zz' is not in" in text
    for u in corpus.splits["val"]:
        u.audio.unlink()
    with pytest.raises(ValueError, match=r"none of the 5 utterances of 'val' can be used; the first: .*0\.wav: there"):
        make("validate")
    corpus.splits["val"] = []
    with pytest.raises(ValueError, match="Tiny has no utterances of 'val'"):
        make("validate")


def test_ctc_needs_a_frame_a_phone_and_one_between_equal_ones(make, corpus):
    first = corpus.splits["train"][:4]
    for subsampling in (1, 4):
        frames = [math.ceil(len(filterbanks(u)) / subsampling) for u in first]
        different = ("aa", "b") * max(frames)
        phones = [
            *(different[: frames[0]], different[: frames[1] + 1]),
            *(("b",) * ((frames[2] + 1) // 2), ("b",) * ((frames[3] + 1) // 2 + 1)),  # n equal ones need 2n − 1 frames
        ]
        corpus.splits["train"] = [u._replace(phones=p) for u, p in zip(first, phones, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = make("fit", model=SimpleNamespace(subsampling=subsampling))
        assert set(rows_of(data.train_dataloader())) == {first[0].id, first[2].id}


def test_the_factor_is_that_of_the_model(make, corpus):
    """Factor 4 leaves out what has a phone for every third frame."""
    utterance = corpus.splits["train"][0]
    n = math.ceil(len(filterbanks(utterance)) / 4)
    corpus.splits["train"] = [utterance._replace(phones=(("aa", "b") * n)[: n + 1])]
    assert utterance.id in rows_of(make("fit").train_dataloader())
    model = SpeechRecognizer(LSTM(8, 1), 20, PHONES, front_end=partial(ConvSubsampling, factor=4))
    data = make("fit")
    data.trainer.lightning_module = model
    with pytest.raises(ValueError, match=f"{n} frames after subsampling, but its phones need {n + 1}"):
        data.setup("fit")
    corpus.splits["val"][0] = corpus.splits["val"][0]._replace(phones=("aa",) * 200)
    with pytest.warns(UserWarning, match="val: 1 of 5 utterances have an error rate, but no loss"):
        data = make("validate")
    assert rows_of(data.val_dataloader())["val-0"][1] == [1] * 200


def test_what_is_lost_while_it_trains_is_named(make, corpus):
    loaders = [make("fit", num_workers=n).train_dataloader() for n in (0, 1)]
    for u in corpus.splits["train"]:
        u.audio.unlink()
    for loader in loaders:
        with pytest.raises(AudioError, match=r"train/\d+\.wav: there is no such file"):
            list(loader)


class Absent(Tiny):
    """Not on this disk."""

    phones = property(lambda self: pytest.fail("asked for the phones"))

    def __init__(self):
        pass

    def prepare(self):
        pytest.fail("prepared")


def test_predict_takes_recordings_without_the_corpus(make, corpus, tmp_path, caplog):
    first, *_, last = corpus.splits["test"]
    manifest = tmp_path / "manifest.jsonl"
    lines = [
        {"audio_filepath": str(last.audio.relative_to(tmp_path)), "offset": 0.05, "duration": 0.15},
        {"audio_filepath": str(last.audio), "id": "whole", "text": ""},
    ]
    manifest.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    folder = corpus.folder / "val"
    for name in ("notes.txt", "._0.wav", ".Trash/old.wav"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no sound")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    linked = last.audio.rename(elsewhere / "far.wav")
    last.audio.symlink_to(linked)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "linked again").symlink_to(elsewhere)
    state = make("fit", normalize="corpus").state_dict()
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"audio_filepath": str(first.audio), "id": "whole"}))
    given = [str(path) for path in (first.audio, folder, manifest, other)]
    data = make(corpus=Absent(), normalize="corpus", audio=given)
    data.prepare_data()
    with caplog.at_level("INFO"):
        data.setup("predict")
    for words in ("4 left out", "2 hidden", ".Trash", "1 ending in .txt", "1 linked to a folder", "linked again"):
        assert words in caplog.text
    data.load_state_dict(state)
    rows = rows_of(data.predict_dataloader())
    part = f"{last.audio.relative_to(tmp_path)}:0.05"
    in_folder = {str(u.audio) for u in corpus.splits["val"]} | {str(folder / "linked" / "far.wav")}
    assert set(rows) == {str(first.audio), *in_folder, part, f"{manifest}:whole", f"{other}:whole"}
    train = torch.cat([filterbanks(u) for u in corpus.splits["train"]])
    assert (rows[str(first.audio)][0] - normal(filterbanks(first), train)).abs().max() < 1e-4
    assert len(rows[part][0]) == 13
    assert not any(labels for _, labels in rows.values())


def test_predict_without_recordings_takes_the_test_split_labelled_or_not(make, corpus):
    corpus.splits["test"][0] = corpus.splits["test"][0]._replace(phones=None)
    corpus.splits["test"][1] = corpus.splits["test"][1]._replace(phones=("aa", "zz"))
    corpus.splits["test"][3].audio.unlink()
    with pytest.warns(UserWarning, match="left out"):
        data = make("test")
    with pytest.warns(UserWarning, match="predict: 1 of 7 utterances are left out:"):
        data.setup("predict")
    assert [len(data.left_out[name]) for name in ("test", "predict")] == [3, 1]
    rows = rows_of(data.predict_dataloader())
    assert set(rows) == {u.id for u in corpus.splits["test"]} - {"test-3"}
    assert rows["test-0"][1] == rows["test-1"][1] == []
    assert rows["test-2"][1]


def test_predict_refuses_recordings_that_cannot_be_used(make, tmp_path, corpus):
    (tmp_path / "empty").mkdir()
    soundfile.write(tmp_path / "stereo.wav", np.zeros((4000, 2)), RATE)
    soundfile.write(tmp_path / "short.wav", np.zeros(100), RATE)
    (tmp_path / "m.jsonl").write_text('{"audio_filepath": "stereo.wav"}\n{"audio": "x"}\n')
    for names, message in {
        "gone.wav": r"gone\.wav: there is no such file",
        "empty": "empty: has no recordings",
        "stereo.wav": r"stereo\.wav: it has 2 channels.*convert it to mono",
        "short.wav stereo.wav": r"short.wav: 0.013 s are less than.*\(1 more of 2 can't be used\)",
        "m.jsonl": r"m\.jsonl:2: lacks audio_filepath",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            make("predict", audio=[str(tmp_path / name) for name in names.split()])
    first = str(corpus.splits["test"][0].audio)
    with pytest.raises(ValueError, match=r"audio=\['.*'\] is for predict only; leave it out to use the corpus"):
        make("fit", audio=[first])
    assert set(rows_of(make("predict", audio=first).predict_dataloader())) == {first}
    with pytest.raises(ValueError, match=r"normalize='corpus' needs .* give ckpt_path of one, or leave normalize out"):
        make("predict", normalize="corpus", audio=[first]).predict_dataloader()


def epoch_of(data, epoch):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def test_nothing_is_changed_or_hidden_in_evaluation(make, tmp_path):
    options = {
        "spec_augment": SpecAugment(freq_mask=10),
        "wave_augment": WaveAugment(probability=1.0, noises="nowhere"),
    }
    plain, augmented = make("test").test_dataloader(), make("test", **options).test_dataloader()
    rows, expected = rows_of(augmented), rows_of(plain)
    assert rows.keys() == expected.keys() != set()
    assert all(torch.equal(rows[name][0], features) for name, (features, _) in expected.items())
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file or folder"):
        make("fit", **options)
    (tmp_path / "noises").mkdir()
    soundfile.write(tmp_path / "noises" / "stereo.wav", np.zeros((4000, 2)), 2 * RATE)
    with pytest.raises(AudioError, match=r"stereo\.wav: it has 2 channels.*convert it to mono"):
        make("fit", wave_augment=WaveAugment(noises=str(tmp_path / "noises")))


def test_what_is_changed_and_hidden_is_a_function_of_seed_epoch_and_utterance(make, corpus):
    masks = {"spec_augment": SpecAugment(freq_mask=10, time_mask=20, max_share=0.5)}
    waves = {"wave_augment": WaveAugment(), "normalize": None}
    corpus.splits["train"][1] = corpus.splits["train"][0]._replace(id="the same recording")
    corpus.splits["train"][5] = corpus.splits["train"][5]._replace(
        id="caf\udce9"
    )  # é in Latin-1, as a disk may have it
    plain, whole = rows_of(epoch_of(make("fit"), 0)), corpus.splits["train"]
    for options in (masks, waves):
        corpus.splits["train"], found = whole, {}
        for seed, epoch in product(range(2), range(2)):
            found[seed, epoch] = rows_of(epoch_of(make("fit", seed=seed, cache=True, **options), epoch))
        for u in whole:
            of_this = [rows[u.id][0] for rows in found.values()]
            assert not any(torch.equal(of_this[0], other) for other in of_this[1:])
            if options is masks:
                assert all(torch.equal(x[x != 0], plain[u.id][0][x != 0]) for x in of_this)
        assert all(not torch.equal(rows["train-0"][0], rows["the same recording"][0]) for rows in found.values())
        corpus.splits["train"] = whole[5:]
        for num_workers in (0, 1):
            rows = rows_of(epoch_of(make("fit", seed=1, batch_frames=70, num_workers=num_workers, **options), 1))
            assert len(rows) == 7
            assert all(torch.equal(rows[name][0], found[1, 1][name][0]) for name in rows)


def test_features_are_of_the_changed_recording(make, corpus):
    augment = WaveAugment(probability=1.0, speed=(1.25, 1.25), noise=None, telephone=False)
    masks = SpecAugment(freq_mask=10, time_mask=20, max_share=0.5)
    rows = rows_of(epoch_of(make("fit", wave_augment=augment), 0))
    for u in corpus.splits["train"]:
        faster = augment(read_audio(u.audio, sample_rate=RATE), RATE, np.random.default_rng(0))
        expected = Filterbanks(RATE, n_mels=20)(faster)
        assert (rows[u.id][0] - normal(expected, expected)).abs().max() < 1e-4
    plain = rows_of(epoch_of(make("fit", spec_augment=masks), 0))
    augment = WaveAugment(probability=1.0, speed=None, telephone=False)
    rows = rows_of(epoch_of(make("fit", spec_augment=masks, wave_augment=augment), 0))
    assert all(torch.equal(rows[name][0] == 0, features == 0) for name, (features, _) in plain.items())


def test_ctc_needs_a_frame_a_phone_at_the_largest_speed_too(make, corpus):
    augment = WaveAugment(speed=(1.0, 1.25))
    utterances = corpus.splits["train"][:4]
    slow = [len(filterbanks(u)) for u in utterances]
    fast = [Filterbanks(RATE, n_mels=20).n_frames(int(((n - 1) * 80 + 200) / 1.25)) for n in slow]
    utterances[0] = utterances[0]._replace(phones=(("aa", "b") * slow[0])[: fast[0]])
    utterances[1] = utterances[1]._replace(phones=(("aa", "b") * slow[1])[: fast[1] + 1])
    utterances[3] = utterances[3]._replace(phones=(), duration=0.03)  # less than a frame at that speed
    corpus.splits["train"] = utterances
    with pytest.warns(UserWarning, match="2 shorter than its phones"):
        data = make("fit", wave_augment=augment, min_seconds=0.0)
    assert set(rows_of(data.train_dataloader())) == {utterances[0].id, utterances[2].id}


def test_what_makes_no_sense_is_refused(make):
    for message, options in {
        "batch_frames=0": {"batch_frames": 0},
        "eval_batch_frames=0": {"eval_batch_frames": 0},
        "batch_utterances=0": {"batch_utterances": 0},
        "seed=-1": {"seed": -1},
        "num_workers=-1": {"num_workers": -1},
        "normalize='all' is unknown": {"normalize": "all"},
        r"min_seconds=5\.0 .* max_seconds=2\.0": {"min_seconds": 5.0, "max_seconds": 2.0},
        "freq_mask=21 must be at most n_mels=20": {"spec_augment": SpecAugment(freq_mask=21)},
        "normalize=None: spec_augment": {"spec_augment": SpecAugment(), "normalize": None},
        r"audio=\[\] is empty": {"audio": []},
        "n_mels=2": {"n_mels": 2},
    }.items():
        with pytest.raises(ValueError, match=message):
            make(**options)
