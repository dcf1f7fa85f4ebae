"""The parsers of the commands that train and score nothing, without PyTorch and Lightning, which are slow to import.

Help and misspelt options therefore take a tenth of a second. Values of options that other modules define are repeated
here; a test compares them.
"""

from __future__ import annotations

import argparse
from typing import Any

from lit_effattn.settings.own_classes import add_trust
from lit_effattn.settings.run_names import add_root


def _parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"lit-effattn {command}", description=description, allow_abbrev=False, **options)


def compare() -> argparse.ArgumentParser:
    """Return the parser of `compare`."""
    made = _parser(
        "compare", "Compare runs: settings that differ, metrics, parameters, bytes of state, time, peak memory."
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="The folder of a run, or model:NAME.")
    made.add_argument(
        "--format", choices=["terminal", "markdown", "csv"], default="terminal", help="Default: terminal."
    )
    made.add_argument("--output", metavar="FILE", help="Write the table here; in Markdown unless --format csv.")
    made.add_argument("--plots", metavar="FOLDER", help="Write curves.png here: metrics by step and by time.")
    made.add_argument(
        "--length",
        type=int,
        help="Positions for which the bytes of a growing state are counted. Default: the length in the data's "
        "configuration, the dimensions of an image, or 1,024.",
    )
    add_trust(made)
    return made


def report() -> argparse.ArgumentParser:
    """Return the parser of `report`."""
    made = _parser(
        "report", "Write one HTML page about runs: configuration, curves, metrics, cost, samples, attention."
    )
    made.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="The folder of a run, a checkpoint, `best` or `last` (of the newest run), a configuration's name (its "
        "newest run), or `model:NAME`, one of `lit-effattn models`.",
    )
    made.add_argument("--output", metavar="FILE", help="The page, a new file. Default: report.html in the run.")
    made.add_argument(
        "--samples", type=int, default=8, help="How many test items and drawn samples to show; 0: none. Default: 8."
    )
    made.add_argument(
        "--length", type=int, default=256, help="Draw attention for at most so many positions. Default: 256."
    )
    add_trust(made)
    return made


def sweep() -> argparse.ArgumentParser:
    """Return the parser of `sweep`."""
    made = _parser(
        "sweep",
        "Train several kinds of attention on the same data for the same number of steps. Each is trained "
        "with seed 0 at every learning rate; the rate with the lowest value of the task's validation metric is then "
        "used for all seeds, whose best checkpoints are tested. An interrupted sweep continues when the command is "
        "repeated. Other flags are those of `lit-effattn fit`.",
    )
    made.add_argument("-c", "--config", action="append", required=True, help="A shipped configuration or a file.")
    made.add_argument(
        "--kinds",
        required=True,
        help="Kinds of attention with commas between: short names (linear), class names, class paths of your own "
        "(my_module.MyAttention), which are then trusted; lstm replaces the whole backbone. Options follow colons: "
        "transformerxl:mem_len=64:dropout=0.1.",
    )
    made.add_argument("--seeds", type=int, default=3, help="Number of seeds at the best rate. Default: 3.")
    made.add_argument("--lr", help="Rates with commas between. Default: 1/3, 1 and 3 times the configuration's.")
    made.add_argument(
        "--devices", help="CUDA devices with commas between, one for each run. Default: one run at a time."
    )
    made.add_argument("--output", metavar="FOLDER", help="Default: runs/sweep_CONFIG.")
    add_trust(made)
    return made


def stream() -> argparse.ArgumentParser:
    """Return the parser of `predict --stream`."""
    made = _parser(
        "predict",
        "Print the phones of a stream of sound as they are recognised. The model must be causal. "
        "A microphone: arecord -t raw -f S16_LE -r 16000 | lit-effattn predict --ckpt_path best --stream -",
    )
    made.add_argument(
        "--stream",
        required=True,
        metavar="FILE",
        help="A recording, or - for the standard input: WAV or samples alone (16 bits, little-endian), one channel, at "
        "the sampling rate of the model.",
    )
    made.add_argument(
        "--ckpt_path", default="best", help="A checkpoint: its path, or last or best of the newest run. Default: best."
    )
    made.add_argument(
        "--times", action="store_true", help="A line for each phone: start in seconds, phone, confidence."
    )
    made.add_argument(
        "--normalize",
        choices=["running"],
        help="running: by mean and variance of the sound so far, for a model trained with normalize: utterance or "
        "speaker. Default: as in training.",
    )
    made.add_argument(
        "--beam_size",
        type=int,
        help="Beam search with so many hypotheses; a phone is printed when all of them agree on it. Default: the "
        "model's decoder.",
    )
    made.add_argument(
        "--block_ms",
        type=int,
        help="Milliseconds that are read at once. Larger blocks take less time. Default: 1000 of a file, 100 of -.",
    )
    made.add_argument(
        "--save_state",
        metavar="FILE",
        help="At the end of the input, or after Ctrl-C, write where the stream stands. It does not end: --state goes "
        "on with more sound.",
    )
    made.add_argument(
        "--state",
        metavar="FILE",
        help="Go on from this file, which --save_state wrote with the same checkpoint and options: the input is the "
        "sound that follows, and times count from the beginning of the stream.",
    )
    add_root(made)
    add_trust(made)
    return made


def export() -> argparse.ArgumentParser:
    """Return the parser of `export`."""
    made = _parser(
        "export",
        "Write a checkpoint's model for other programs. onnx and torch: a streaming step, whose state is an input and "
        "an output. safetensors: the weights and the configuration, which all commands read as a checkpoint.",
    )
    made.add_argument(
        "--ckpt_path",
        default="best",
        help="A checkpoint: its path, last or best of the newest run, or model:NAME. Default: best.",
    )
    made.add_argument("--format", choices=["onnx", "torch", "safetensors"], default="onnx", help="Default: onnx.")
    made.add_argument("--output", metavar="FILE", help="Default: in the folder `exported` of the run.")
    made.add_argument(
        "--max_len", type=int, help="Most positions of a stream, for attention that keeps every position."
    )
    made.add_argument("--batch_size", type=int, default=1, help="Rows of a step. Default: 1.")
    made.add_argument(
        "--check",
        type=int,
        default=32,
        metavar="N",
        help="Steps to compare with PyTorch before the file is written. Default: 32.",
    )
    made.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        help="safetensors: type of the floating-point weights. Default: as they are. float16 halves the file.",
    )
    made.add_argument(
        "--normalize",
        choices=["running"],
        help="running: the step of a recogniser normalises by mean and variance of the sound so far, for one that was "
        "trained with normalize: utterance or speaker. Default: as in training.",
    )
    made.add_argument(
        "--operators",
        choices=["opset18", "opset27", "onnxruntime"],
        default="opset18",
        help="onnx: opset18, which every runtime has. opset27: LinearAttention and CausalConvWithState, so the file "
        "reads prompts, for linear attention and the kinds with decay or the delta rule. "
        "onnxruntime: the same two of its domain com.microsoft, for which it has kernels. Default: opset18.",
    )
    made.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    add_root(made)
    add_trust(made)
    return made


def convert() -> argparse.ArgumentParser:
    """Return the parser of `convert`."""
    made = _parser(
        "convert",
        "Convert a folder of Hugging Face weights (GPT-2, Llama, Mistral, Qwen) to a checkpoint with a "
        "configuration, in the new folder TO; or a checkpoint to such a folder. Nothing is downloaded.",
    )
    made.add_argument("source", metavar="FROM", help="The folder, or the checkpoint.")
    made.add_argument("target", metavar="TO", help="The folder to make.")
    add_trust(made)
    return made


def prepare() -> argparse.ArgumentParser:
    """Return the parser of `data prepare`."""
    made = _parser(
        "data prepare",
        "Tokenize a text larger than memory, in parallel, into files that training maps. After an "
        "interruption the same command continues.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("input", metavar="INPUT", help="A file, or a folder: .txt or .jsonl, as they are or with .gz.")
    made.add_argument("folder", metavar="FOLDER", help="The folder to create, or to continue.")
    made.add_argument(
        "--tokens",
        default="bytes",
        choices=["bytes", "characters", "words", "bpe"],
        help="How to tokenize; all but bytes are learnt.",
    )
    made.add_argument("--vocab_size", type=int, help="words, bpe: size of the vocabulary.")
    made.add_argument("--tokenizer_of", help="A checkpoint (or model:NAME) whose tokenizer to use, in place of these.")
    made.add_argument("--field", default="text", help="Name of the text in the lines of a .jsonl.")
    made.add_argument(
        "--held_out", type=int, default=200, help="One of so many documents is for validation, one for test."
    )
    made.add_argument("--shard_bytes", type=int, default=256_000_000, help="Bytes of input for a shard.")
    made.add_argument("--learn_bytes", type=int, default=100_000_000, help="Bytes of text to learn a vocabulary from.")
    made.add_argument("--workers", type=int, default=1, help="Number of processes.")
    return made
