import os
import pickle
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch

from lit_effattn.datamodules import Filterbanks, Utterance
from lit_effattn.datamodules.speech.audio import AudioError
from lit_effattn.datamodules.speech.feature_store import FeatureReader, stored_features
from lit_effattn.datamodules.speech.filterbanks import moments

READER = FeatureReader(Filterbanks(8000, n_mels=20), 0.1, 2.0, False)
SPEAKERS = ["ann", "bob", "ann", None]


def write(path, seconds, seed=0, rate=8000):
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * rate))
    soundfile.write(path, samples, rate)
    return path


@pytest.fixture
def utterances(tmp_path):
    """Four that are good, of which two lie in one file, and three that are not."""
    audio = [write(tmp_path / f"{i}.wav", 0.3 + 0.1 * i, i) for i in range(3)]
    good = [Utterance(f"u{i}", path, speaker=who) for i, (path, who) in enumerate(zip(audio, SPEAKERS, strict=False))]
    part = Utterance("part", audio[2], start=0.1, duration=0.25)
    long, short = write(tmp_path / "long.wav", 2.1), write(tmp_path / "short.wav", 0.05)
    bad = [Utterance("gone", tmp_path / "gone.wav"), Utterance("long", long), Utterance("short", short)]
    return [good[0], bad[0], good[1], good[2], bad[1], bad[2], part]


def stored(utterances, folder, *, keep=True, reader=READER, num_workers=0):
    return stored_features(utterances, reader, name="train", folder=folder, keep=keep, num_workers=num_workers)


@pytest.fixture
def reads(monkeypatch):
    """How many utterances have been read so far."""
    count = []
    call = FeatureReader.__call__
    monkeypatch.setattr(FeatureReader, "__call__", lambda reader, u: count.append(u.id) or call(reader, u))
    return count


GOOD = (0, 2, 3, 6)


def test_all_that_can_be_read_is_and_the_rest_is_named(tmp_path, utterances):
    expected, before = {i: READER(utterances[i]) for i in GOOD}, torch.get_rng_state()
    utterances.append(Utterance("no name", tmp_path / "a\0.wav"))
    for keep, num_workers in ((False, 0), (True, 2)):
        features = stored(utterances, tmp_path / "cache", keep=keep, num_workers=num_workers)
        readings = features.readings
        assert readings.n_frames.tolist() == [len(expected.get(i, ())) for i in range(8)]
        assert all(torch.equal(features[i], expected[i]) for i in GOOD)
        reasons = {1: "missing", 4: "too long", 5: "too short", 7: "missing"}
        assert {i: fault.reason for i, fault in readings.faults.items()} == reasons
        assert "gone.wav: there is no such file" in readings.faults[1].message
        assert "short.wav: 0.050 s are less than min_seconds=0.1" in readings.faults[5].message
        assert set(readings.statistics) == {None, "ann", "bob"}
        for who, of in ((None, GOOD), ("ann", (0, 3)), ("bob", (2,))):
            together = moments(torch.cat([expected[i] for i in of]))
            assert torch.allclose(readings.statistics[who], together, rtol=1e-12)
        sent = pickle.dumps(features)
        assert expected[3].numpy().tobytes() not in sent  # the file is not sent to workers
        assert torch.equal(pickle.loads(sent)[3], expected[3])
    assert torch.equal(before, torch.get_rng_state())


def test_a_second_run_reads_nothing(tmp_path, utterances, reads):
    for keep in (True, False):
        first = stored(utterances, tmp_path / str(keep), keep=keep)
        del reads[:]
        again = stored(utterances, tmp_path / str(keep), keep=keep)
        assert torch.equal(first[3], again[3])
        assert len(reads) == (0 if keep else 2)
        assert again.readings.faults == first.readings.faults
        assert again.readings.n_frames.tolist() == first.readings.n_frames.tolist()
        again[3][:] = 0  # a copy
        assert torch.equal(first[3], READER(utterances[3]))
        assert bool(list((tmp_path / str(keep)).rglob("*.bin"))) == keep


def rewritten(utterances):
    status = utterances[0].audio.stat()
    write(utterances[0].audio, 0.3, seed=9)
    os.utime(utterances[0].audio, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    return utterances


def test_what_has_changed_is_read_anew(tmp_path, utterances, reads):
    def found(utterances):
        write(utterances[1].audio, 0.3)
        return utterances

    changes = [
        lambda u: u,
        lambda u: [u[0]._replace(id="other"), *u[1:]],
        lambda u: [u[0]._replace(speaker="bob"), *u[1:]],
        lambda u: [*u[:-1], u[-1]._replace(duration=0.2)],
        lambda u: [u[0]._replace(phones=("a",)), *u[1:]],
        rewritten,
        found,
    ]
    settings = [
        *({"filterbanks": Filterbanks(8000, n_mels=20, hop_ms=12.5)}, {"filterbanks": Filterbanks(8000, n_mels=21)}),
        *({"min_seconds": 0.01}, {"max_seconds": 3.0}, {"upsample": True}),
    ]
    for number, change in enumerate(changes, 1):
        changed = change(utterances)
        features = stored(changed, tmp_path / "cache")
        assert len(reads) == 7 * number
        assert all(torch.equal(features[i], READER(changed[i])) for i in (0, 6))
        del reads[7 * number :]
    for number, setting in enumerate(settings, len(changes) + 1):
        stored(changed, tmp_path / "cache", reader=READER._replace(**setting))
        assert len(reads) == 7 * number


def test_what_was_damaged_or_interrupted_is_made_again(tmp_path, utterances, monkeypatch, reads):
    def check():
        assert torch.equal(stored(utterances, tmp_path / "cache")[6], READER(utterances[6]))

    def interrupted(reader, utterance):
        if utterance.id == "u2":
            raise KeyboardInterrupt
        return call(reader, utterance)

    call = FeatureReader.__call__
    with monkeypatch.context() as patch:
        patch.setattr(FeatureReader, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stored(utterances, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("lit_effattn.datamodules.speech.audio.regular", Mock(side_effect=OSError(5, "of the disk")))
        with pytest.raises(AudioError, match=r"0\.wav: it cannot be opened \(of the disk"):
            stored(utterances, tmp_path / "cache")
    assert not list(tmp_path.rglob("*.bin"))
    check()
    for name in ("features.bin", "features.npy", "about.json"):
        (path,) = (tmp_path / "cache").glob(f"*/{name}")
        path.unlink() if name == "features.npy" else path.write_bytes(path.read_bytes()[:-5])
        check()
    (folder,) = (p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    left = folder.rename(folder.with_name(f".{folder.name}.lit-effattn-unfinished"))  # by a killed run
    (left / "features.bin").write_bytes(b"half")
    check()
    assert not left.exists()
    assert stored([utterances[1]], tmp_path / "nothing").readings.n_frames.tolist() == [0]
    del reads[:]
    threads = [threading.Thread(target=stored, args=(utterances, tmp_path / "threads")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 7  # one reads, the others wait
