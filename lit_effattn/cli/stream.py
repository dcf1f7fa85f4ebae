"""`lit-effattn predict --stream`: recognise phones while somebody speaks."""

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.loading import load_model
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import find_checkpoint, short
from lit_effattn.checks import at_least
from lit_effattn.cli.threads import few_threads
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.speech.audio import AudioError, stream_audio, stream_pipe
from lit_effattn.settings.tools import add_root, add_trust, tool_parser
from lit_effattn.stopping import Receiver, Stopped, handle
from lit_effattn.tasks.ctc import BeamDecoder
from lit_effattn.tasks.kept_states import check_replaceable, load_stream, save_stream
from lit_effattn.tasks.speech import SpeechRecognizer
from lit_effattn.tasks.speech_stream import RecognizedPhone, SpeechStream, stream_features

_BY_BLOCK = (
    "warning: the phones may depend on --block_ms, since a position of this model sees all of its block; train "
    "{kind} with {option}: true"
)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "predict",
        "Print the phones of a stream of sound as they are recognised. The model must be causal. "
        "A microphone: arecord -t raw -f S16_LE -r 16000 | lit-effattn predict --ckpt_path best --stream -",
    )
    parser.add_argument(
        "--stream",
        required=True,
        metavar="FILE",
        help="A recording, or - for the standard input: WAV or samples alone (16 bits, little-endian), one channel, at "
        "the sampling rate of the model.",
    )
    parser.add_argument(
        "--ckpt_path", default="best", help="A checkpoint: its path, or last or best of the newest run. Default: best."
    )
    parser.add_argument("--times", action="store_true", help="A line a phone: start in seconds, phone, confidence.")
    parser.add_argument(
        "--normalize",
        choices=["running"],
        help="running: by mean and variance of the sound so far, for a model trained with normalize: utterance or "
        "speaker. Default: as in training.",
    )
    parser.add_argument(
        "--beam_size",
        type=int,
        help="Beam search with so many hypotheses; a phone is printed when all of them agree on it. Default: the "
        "model's decoder.",
    )
    parser.add_argument(
        "--block_ms",
        type=int,
        help="Milliseconds that are read at once. Larger blocks take less time. Default: 1000 of a file, 100 of -.",
    )
    parser.add_argument(
        "--save_state",
        metavar="FILE",
        help="At the end of the input, or after Ctrl-C, write where the stream stands. It does not end: --state goes "
        "on with more sound.",
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="Go on from this file, which --save_state wrote with the same checkpoint and options: the input is the "
        "sound that follows, and times count from the beginning of the stream.",
    )
    add_root(parser)
    add_trust(parser)
    return parser


def stream(args: list[str]) -> None:
    """Print the phones of a stream of sound as they are recognised.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If the model is not a causal recogniser, its features look ahead, or the sound or the state can't
            be read.
    """
    given = _parser().parse_args(args)
    block_ms = given.block_ms if given.block_ms is not None else 100 if given.stream == "-" else 1000
    at_least(1, block_ms=block_ms)
    if given.save_state is not None:
        check_replaceable(Path(given.save_state))
    decoder = None if given.beam_size is None else BeamDecoder(given.beam_size)
    path = find_checkpoint(given.ckpt_path, Path(given.root))
    content = read_checkpoint(path)
    model = load_model(SpeechRecognizer, path, map_location="cpu", trust=given.trust, content=content)
    features = stream_features(content, short(path), given.normalize)
    if features is None:
        raise ValueError(f"{short(path)}: it has no sample_rate and n_mels of SpeechData; use a checkpoint of a run")
    banks = features.filterbanks
    phones = SpeechStream(model, banks, features.normalization(), decoder)
    if given.state is not None:
        load_stream(phones, regular(Path(given.state)))
    if given.save_state is not None:
        _ = phones.kept  # a beam search raises now, not after an hour
    by_block = [module for module in model.backbone.modules() if getattr(module, "depends_on_split", False)]
    for module in by_block[:1]:
        print(_BY_BLOCK.format(kind=type(module).__name__, option=module.split_option), file=sys.stderr)
    heard = False
    try:
        for samples in _sound(given.stream, banks.sample_rate, block_ms):
            with _uninterrupted(), few_threads(model):
                _print(phones(samples), times=given.times)
                heard = True
    except (KeyboardInterrupt, Stopped):
        if given.save_state is None or heard:
            _finish(phones, given)
        raise
    except AudioError:  # such as the end of a file that was cut off
        if given.save_state is None and heard:
            _finish(phones, given)
        raise
    _finish(phones, given)


def _print(phones: Iterable[RecognizedPhone], *, times: bool) -> None:
    for phone in phones:
        name = printable(phone.phone, one_line=True)
        if times:
            print(f"{phone.start:.2f}\t{name}\t{phone.confidence:.2f}", flush=True)
        else:
            print(name, end=" ", flush=True)


def _finish(stream: SpeechStream, given: argparse.Namespace) -> None:
    """Print the last phones, or save where the stream stands."""
    if given.save_state is None:
        _print(stream(torch.zeros(0), last=True), times=given.times)
    if not given.times:
        print()
    if given.save_state is not None:
        save_stream(stream, Path(given.save_state))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a signal wait for the end of the block, since half a step would leave a stream that stands nowhere."""
    receiver = Receiver(lambda number: None)
    restore = handle(receiver)
    try:
        yield
    finally:
        restore()
    if receiver.number:
        signal.raise_signal(receiver.number)


def _sound(name: str, sample_rate: int, block_ms: int) -> Iterator[Tensor]:
    block = max(1, sample_rate * block_ms // 1000)
    if name != "-":
        return stream_audio(Path(name), sample_rate, block)
    if sys.stdin is None or sys.stdin.buffer.isatty():
        kind = "closed" if sys.stdin is None else "a terminal"
        raise ValueError(f"-: the standard input is {kind}; send the sound through a pipe, or name a file")
    return stream_pipe(sys.stdin.buffer, sample_rate, block)
