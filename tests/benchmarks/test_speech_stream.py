import argparse

import pytest
import torch

from benchmarks import speech_stream
from benchmarks.measuring import Spread
from benchmarks.speech_stream import OnnxStream, blocks, export_step, latencies, run
from lit_effattn import LSTM
from lit_effattn.datamodules import Filterbanks
from lit_effattn.tasks.speech_stream import SpeechStream

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(speech_stream, "KINDS", {"LSTM": lambda: LSTM(8, 1)})
    monkeypatch.setattr(speech_stream, "SATURATED", 1)
    monkeypatch.setattr(speech_stream, "HOUR_BLOCK", 30)


def test_both_programs_recognise_the_same(tmp_path):
    """In blocks that are no multiple of a frame; the last frames need samples that do not follow."""
    model, banks = speech_stream.model("LSTM"), Filterbanks()
    model.output.weight.data *= 30
    plain, exported = SpeechStream(model, banks), OnnxStream(export_step(model, banks, tmp_path))
    phones, labels = [], []
    for i, block in enumerate(blocks(4, 90, banks)):
        block *= 1e-4 if i % 5 else 1  # else one label is the likeliest of all frames
        phones += [phone.phone for phone in plain(block)]
        labels += exported(block)
    assert [model.phones[label - 1] for label in labels] == phones
    assert len(phones) > 3


def test_a_kind_has_a_row_for_each_program():
    report = run(argparse.Namespace(kinds=["LSTM"], seconds=1, repeats=2, minutes=1))
    assert [(row["kind"], row["program"]) for row in report.rows] == [("LSTM", "PyTorch"), ("LSTM", "onnxruntime")]
    for row in report.rows:
        state = 4 * 2 * 8 / 1000  # h and c of 8 cells
        assert row["state after 1 min, kB"] == row["after 1 min"] >= state
        factor, p50, p99 = (row[name] for name in ("real-time factor", "p50, ms", "p99, ms"))
        assert isinstance(factor, Spread)
        assert all(0 < a <= b for a, b in zip(p50.samples, p99.samples, strict=True))

    with pytest.raises(ValueError, match="minutes=1 is less than the timed part"):
        run(argparse.Namespace(kinds=["LSTM"], seconds=30, repeats=2, minutes=1))


def test_latencies_are_those_of_each_block():
    read: list[int] = []
    taken = latencies(lambda samples: read.append(len(samples)), blocks(1, 100, Filterbanks()))
    assert read == [1600] * 10
    assert len(taken) == 10
    assert min(taken) > 0
    assert not torch.equal(*list(blocks(0.2, 100, Filterbanks())))
