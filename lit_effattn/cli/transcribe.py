"""`lit-effattn transcribe`: recognise phones while somebody speaks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.runs import find_checkpoint, short
from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.speech.audio import stream_audio, stream_pcm
from lit_effattn.settings import parsers
from lit_effattn.tasks.ctc import BeamDecoder
from lit_effattn.tasks.kept_states import check_replaceable, load_stream, save_stream
from lit_effattn.tasks.speech import SpeechRecognizer
from lit_effattn.tasks.speech_stream import SpeechStream, stream_features


def transcribe(args: list[str]) -> None:
    """Print the phones of a stream of sound as they are recognised.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If the model is not a causal recogniser, its features look ahead, or the sound or the state can't
            be read.
    """
    given = parsers.transcribe().parse_args(args)
    block_ms = given.block_ms if given.block_ms is not None else 100 if given.input == "-" else 1000
    at_least(1, block_ms=block_ms)
    if given.save_state is not None:
        check_replaceable(Path(given.save_state))
    decoder = None if given.beam_size is None else BeamDecoder(given.beam_size)
    path = find_checkpoint(given.ckpt_path, Path(given.root))
    model = SpeechRecognizer.load_from_checkpoint(path, map_location="cpu", trust=given.trust)
    features = stream_features(read_checkpoint(path, "cpu"), short(path), given.normalize)
    if features is None:
        raise ValueError(
            f"{short(path)}: it has no sample_rate and n_mels of SpeechData; use a checkpoint of a training run"
        )
    banks = features.filterbanks
    stream = SpeechStream(model, banks, features.normalization(), decoder)
    if given.state is not None:
        load_stream(stream, regular(Path(given.state)))
    if given.save_state is not None:
        save_stream(stream, Path(given.save_state))  # an error now, not after an hour
    blocks = _sound(given.input, banks.sample_rate, block_ms)
    for samples, last in _with_last(blocks) if given.save_state is None else ((block, False) for block in blocks):
        for phone in stream(samples, last=last):
            if given.times:
                print(f"{phone.start:.2f}\t{phone.phone}\t{phone.confidence:.2f}", flush=True)
            else:
                print(phone.phone, end=" ", flush=True)
    if not given.times:
        print()
    if given.save_state is not None:
        save_stream(stream, Path(given.save_state))


def _sound(name: str, sample_rate: int, block_ms: int) -> Iterator[Tensor]:
    block = max(1, sample_rate * block_ms // 1000)
    return (
        stream_pcm(sys.stdin.buffer, sample_rate, block)
        if name == "-"
        else stream_audio(Path(name), sample_rate, block)
    )


def _with_last(blocks: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the blocks, and then an empty one as the last: a pipe does not say in advance that it ends."""
    for block in blocks:
        yield block, False
    yield torch.zeros(0), True
