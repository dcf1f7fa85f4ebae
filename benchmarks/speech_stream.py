"""Speech while somebody speaks: real-time factor, latency and state by attention, in PyTorch and in onnxruntime."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Spread, add_options, interleaved
from benchmarks.report import Report, Row
from lit_effattn import LSTM, Transformer
from lit_effattn import attention as attentions
from lit_effattn.checkpoints.shipped import METADATA
from lit_effattn.datamodules import Filterbanks
from lit_effattn.interchange.export import export
from lit_effattn.nn.front_ends import ConvSubsampling
from lit_effattn.sequence import SequenceModule, nbytes
from lit_effattn.tasks import SpeechRecognizer
from lit_effattn.tasks.speech_stream import SpeechStream

WINDOW = 128
"""Frames of the model, of 40 ms, in the window of softmax attention and in Transformer-XL's memory."""

N_PHONES = 50
BLOCK_MS = 100
HOUR_BLOCK = 10  # seconds of a block after the timed ones
SATURATED = 60  # seconds after which the state is counted first

NOTES = [
    "Models of the size of russian_linear and russian_bilstm (one direction), causal, with random weights; "
    f"{N_PHONES} phones, a frame of the model each 40 ms. Window and memory: {WINDOW} frames, {WINDOW * 0.04:.1f} s.",
    f"real-time factor: seconds of computation for a second of sound, in blocks of {BLOCK_MS} ms, from samples to "
    "phones (greedy).",
    f"p50, p99: milliseconds of computation for a block of {BLOCK_MS} ms.",
    "PyTorch: SpeechStream. onnxruntime: the exported step, once for each frame, in a program of numpy alone.",
    f"state: bytes of the backbone's state. The sound after the timed part is read in blocks of {HOUR_BLOCK} s.",
]


def _transformer(kind: Any) -> SequenceModule:
    return Transformer(144, 4, 6, attention=kind)


KINDS: dict[str, Callable[[], SequenceModule]] = {
    "linear": partial(_transformer, attentions.LinearAttention),
    "softmax, window": partial(_transformer, partial(attentions.SoftmaxAttention, window=WINDOW)),
    "Transformer-XL": partial(
        _transformer, partial(attentions.TransformerXLAttention, mem_len=WINDOW, same_length=True)
    ),
    "Performer": partial(_transformer, attentions.PerformerAttention),
    "LSTM": partial(LSTM, 320, 3, d_input=144),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, seconds=(60, "timed seconds of sound in a round"), repeats=(3, "rounds"))
    add_options(parser, minutes=(60, "minutes of sound after which the state is counted again"))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")


def run(args: argparse.Namespace) -> Report:
    if 60 * args.minutes < SATURATED + args.seconds * args.repeats:
        raise ValueError(f"minutes={args.minutes} is less than the timed part and the minute before it; give more")
    rows = [row for kind in args.kinds for row in _rows(kind, args)]
    return Report("speech_stream", rows, NOTES)


def model(kind: str) -> SpeechRecognizer:
    """Make a recogniser with random weights."""
    torch.manual_seed(0)
    phones = tuple(f"p{i}" for i in range(N_PHONES))
    return SpeechRecognizer(KINDS[kind](), 40, phones, front_end=ConvSubsampling).eval()


def blocks(seconds: float, ms: int, banks: Filterbanks) -> Iterator[Tensor]:
    """Yield so many seconds of noise in blocks of `ms` milliseconds."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(round(1000 * seconds / ms)):
        yield 0.1 * torch.randn(banks.sample_rate * ms // 1000, generator=generator)


def latencies(stream: Callable[[Tensor], Any], sound: Iterator[Tensor]) -> list[float]:
    """Return the seconds that each block took."""
    taken = []
    for block in sound:
        start = time.perf_counter()
        stream(block)
        taken.append(time.perf_counter() - start)
    return taken


class OnnxStream:
    """Recognises phones by the exported step, as the program of docs/export.md does.

    Args:
        path: The exported step.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        about = json.loads(self._session.get_modelmeta().custom_metadata_map[METADATA])
        parts = about["state"]
        self._state = {p["name"]: np.full(p["shape"], np.array(p["fill"], float), p["dtype"]) for p in parts}
        self._hop = about["subsampling"] * about["sound"]["hop"]
        self._size = self._hop - about["sound"]["hop"] + about["sound"]["frame"]
        self._lengths = np.array([about["subsampling"]])
        self._samples = np.zeros(0, np.float32)
        self._label = 0

    def __call__(self, samples: Tensor) -> list[int]:
        """Return the labels that begin in the next samples."""
        self._samples = np.concatenate([self._samples, samples.numpy()])
        labels = []
        while len(self._samples) >= self._size:
            inputs = {"samples": self._samples[None, : self._size], "lengths": self._lengths}
            log_probs, *after = self._session.run(None, inputs | self._state)
            self._state = dict(zip(self._state, after, strict=True))
            self._samples = self._samples[self._hop :]
            before, self._label = self._label, int(log_probs[0].argmax())
            if self._label not in (0, before):
                labels.append(self._label)
        return labels


def _rows(kind: str, args: argparse.Namespace) -> list[Row]:
    recognizer, banks = model(kind), Filterbanks()
    with TemporaryDirectory() as folder:
        path = export_step(recognizer, banks, Path(folder))
        streams: dict[str, Callable[[Tensor], Any]] = {
            "PyTorch": SpeechStream(recognizer, banks),
            "onnxruntime": OnnxStream(path),
        }
        for stream in streams.values():
            latencies(stream, blocks(SATURATED, BLOCK_MS, banks))  # the state is then as large as it will be
        counted = nbytes(streams["PyTorch"].state)  # type: ignore[attr-defined]
        measures = {
            name: partial(lambda stream: latencies(stream, blocks(args.seconds, BLOCK_MS, banks)), stream)
            for name, stream in streams.items()
        }
        taken = interleaved(kind, measures, args.repeats)
        for block in blocks(60 * args.minutes - SATURATED - args.seconds * args.repeats, 1000 * HOUR_BLOCK, banks):
            streams["PyTorch"](block)
    after = nbytes(streams["PyTorch"].state)  # type: ignore[attr-defined]
    return [
        {
            "kind": kind,
            "program": name,
            "real-time factor": Spread(tuple(sum(blocks) / args.seconds for blocks in rounds)),
            "p50, ms": Spread(tuple(1000 * float(np.quantile(blocks, 0.5)) for blocks in rounds)),
            "p99, ms": Spread(tuple(1000 * float(np.quantile(blocks, 0.99)) for blocks in rounds)),
            "state after 1 min, kB": counted / 1000,
            f"after {args.minutes} min": after / 1000,
        }
        for name, rounds in taken.items()
    ]


def export_step(recognizer: SpeechRecognizer, banks: Filterbanks, folder: Path) -> Path:
    """Export the step that reads samples."""
    options = {"sample_rate": banks.sample_rate, "n_mels": banks.n_mels, "normalize": None}
    saved = {"datamodule_hyper_parameters": options}
    return export(recognizer, folder / "step.onnx", format="onnx", saved=saved, check=2).path
