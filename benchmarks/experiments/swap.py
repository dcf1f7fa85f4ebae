"""Replacing a trained model's softmax attention by Performer's: the loss of quality, and its recovery by training."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.measuring import add_options
from benchmarks.report import Report, Row
from lit_effattn import PixelModel
from lit_effattn.attention import PerformerAttention
from lit_effattn.checkpoints.runs import find_checkpoint
from lit_effattn.datamodules import PixelSequences
from lit_effattn.tasks.schedules import WarmupCosine

NOTES = [
    "bits/dim on the test images. swapped: the softmax model with its attention replaced, nothing trained. "
    "fine-tuned: then trained with Adam at 3e-4 and a cosine to 0.",
    "The command does the same: `lit-effattn fit --config configs/digits_performer.yaml --init_weights SOFTMAX.ckpt`.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ckpt_path", help="of a PixelModel with softmax; default: best of runs/digits_softmax")
    add_options(parser, n_features=[32, 112, 256], epochs=[1, 5], seeds=(3, "draws of the features"))


def run(args: argparse.Namespace) -> Report:
    path = Path(args.ckpt_path) if args.ckpt_path else find_checkpoint("best", Path("runs/digits_softmax"))
    softmax = PixelModel.load_from_checkpoint(path)
    data = PixelSequences("digits", batch_size=32, eval_batch_size=90)
    trained = _bits(softmax, data, args.device)
    rows: list[Row] = []
    for f in args.n_features:
        swapped = [_bits(_twin(path, f, seed), data, args.device) for seed in range(args.seeds)]
        row: Row = {
            "n_features": f,
            "softmax": f"{trained:.4f}",
            f"swapped, {args.seeds} draws": ", ".join(f"{bits:.3f}" for bits in sorted(swapped)),
        }
        for epochs in args.epochs:
            twin = _twin(path, f, 0)
            _fine_tune(twin, data, epochs, args)
            row[f"fine-tuned, {epochs} epochs"] = f"{_bits(twin, data, args.device):.4f}"
        rows.append(row)
    return Report("swap", rows, NOTES)


def replace_attention(backbone: Any, kind: Callable[..., Any]) -> None:
    """Replace the attention of every layer by another with the same projections."""
    for block in backbone.blocks:
        old = block.attention
        new = kind(old.d_model, old.n_heads, old.causal).to(old.q_proj.weight)
        projections = {name: t for name, t in old.state_dict().items() if "_proj." in name}
        assert {name for name, _ in new.named_parameters()} == projections.keys()
        new.load_state_dict(projections, strict=False)  # all but the features, which are new
        block.attention = new.train(old.training)


def _twin(path: Path, n_features: int, seed: int) -> PixelModel:
    """Return the model with Performer's attention and the same parameters."""
    torch.manual_seed(seed)
    model = PixelModel.load_from_checkpoint(path)
    replace_attention(model.backbone, partial(PerformerAttention, n_features=n_features))
    return model


def _fine_tune(model: PixelModel, data: PixelSequences, epochs: int, args: argparse.Namespace) -> None:
    data.setup("fit")
    steps = epochs * (len(data.splits["train"]) // data.batch_size)
    model._optimizer = partial(torch.optim.Adam, lr=3e-4)
    model._lr_scheduler = partial(WarmupCosine, total_steps=steps, warmup_steps=min(20, steps - 1))
    trainer = _trainer(args.device, max_epochs=epochs, gradient_clip_val=1.0)
    trainer.fit(model, data.train_dataloader())


def _bits(model: PixelModel, data: PixelSequences, device: torch.device) -> float:
    data.setup("test")
    (result,) = _trainer(device).test(model, data.test_dataloader(), verbose=False)
    return result["test/bits_per_dim"]


def _trainer(device: torch.device, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    return pl.Trainer(accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, **quiet, **options)
