"""Small runs of five tasks, and a deterministic cover of the pairs of their settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lit_effattn.checkpoints.runs import find_checkpoint
from tests.support.commands import spec
from tests.support.tones import Tones

TRUST = ["--trust", "tests.faults.moments", "--trust", "tests.support.tones.Tones"]
EPOCHS = 3

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "task": ("pixels", "classes", "text", "speech", "sorting", "pairs"),
    "limits": ("max_steps", "max_epochs", "both", "max_time"),
    "moment": ("mid-epoch", "last step of an epoch", "first step", "during validation"),
    "processes": (1, 2),
    "accumulate": (1, 3),
    "validation": ("each epoch", "within epochs", "across epochs"),
    "schedule": ("warm-up", "plateau"),
}

BATCHES = {"pixels": 10, "classes": 10, "text": 11, "speech": 10, "sorting": 12, "pairs": 10}
"""Training batches of an epoch, for any number of processes: divisible by 3 in one task only."""


@dataclass(frozen=True)
class Settings:
    """What determines an uninterrupted run.

    Attributes:
        task: pixels, classes, text, speech, sorting or pairs.
        limits: What ends the run: max_steps in mid-epoch, max_epochs, or both at the same step. A run of max_time has
            max_epochs, and is stopped before by the time limit.
        processes: 1 or 2.
        accumulate: Batches of an optimiser step.
        validation: "each epoch"; "within epochs", every four batches; or "across epochs", three batches after an epoch.
        schedule: "warm-up" or "plateau" (`ReduceLROnPlateau`).
        every_n_train_steps: As in `LastCheckpoint`.
        asynchronous: As in `LastCheckpoint`.
        sharded: Each process has a part of every parameter, else all of them.
    """

    task: str = "pixels"
    limits: str = "max_epochs"
    processes: int = 1
    accumulate: int = 1
    validation: str = "each epoch"
    schedule: str = "warm-up"
    every_n_train_steps: int | None = None
    asynchronous: bool = False
    sharded: bool = False

    def __str__(self) -> str:
        parts = [self.task, f"{self.processes} process{'es' * (self.processes > 1)}", self.limits]
        parts += [f"accumulate {self.accumulate}", f"validation {self.validation}", self.schedule]
        parts += [f"saved every {self.every_n_train_steps}"] if self.every_n_train_steps else []
        return ", ".join([*parts, *(name for name in ("asynchronous", "sharded") if getattr(self, name))])

    @property
    def batches(self) -> int:
        """Training batches of an epoch."""
        return BATCHES[self.task]

    @property
    def steps(self) -> int:
        """Optimiser steps of an epoch. The last window of an epoch may be short."""
        return math.ceil(self.batches / self.accumulate)

    def config(self) -> dict[str, Any]:
        """Return the configuration of the run."""
        model, data = TASKS[self.task]
        init_args: dict[str, Any] = {
            **model["init_args"],
            "optimizer": spec("torch.optim.RAdam", lr=0.003),
            "lr_scheduler": _SCHEDULES[self.schedule],
        }
        data = {**data, "init_args": {**data["init_args"], **_for_processes(self.task, self.processes)}}
        trainer: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.processes,
            "strategy": "ModelParallelStrategy" if self.sharded else "ddp" if self.processes > 1 else "auto",
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accumulate_grad_batches": self.accumulate,
            "callbacks": [
                *([{"class_path": "MemoryCarry"}] if self.task in ("text", "sorting") else []),
                {"class_path": "tests.faults.moments.Fault"},
            ],
            **_limits(self.limits, self.steps),
        }
        if self.validation == "within epochs":
            trainer |= {"val_check_interval": 4, "check_val_every_n_epoch": 1}
        if self.validation == "across epochs":
            trainer["val_check_interval"] = self.batches + 3
        return {
            "seed_everything": 3,
            "model": {**model, "init_args": init_args},
            "data": data,
            "trainer": trainer,
            "checkpoint": {"every_n_train_steps": self.every_n_train_steps, "asynchronous": self.asynchronous},
        }


def _limits(limits: str, steps: int) -> dict[str, int]:
    if limits == "max_steps":
        return {"max_steps": (EPOCHS - 1) * steps + max(1, steps // 2), "max_epochs": -1}
    if limits == "both":
        return {"max_steps": EPOCHS * steps, "max_epochs": EPOCHS}
    return {"max_epochs": EPOCHS}


def _for_processes(task: str, processes: int) -> dict[str, int]:
    """Return the options that keep the number of batches: each process gets a part of the batch."""
    if task == "speech":
        return {"batch_frames": 100 // processes}
    if task == "pairs":
        return {"batch_tokens": 60 // processes}
    return {"batch_size": {"pixels": 140, "classes": 140, "text": 4, "sorting": 8}[task] // processes}


_SCHEDULES = {
    "warm-up": spec("WarmupCosine", total_steps=40, warmup_steps=3),
    # No improvement is enough: it halves each time.
    "plateau": spec("torch.optim.lr_scheduler.ReduceLROnPlateau", patience=0, threshold=10.0, factor=0.5),
}


def _backbone(attention: Any, **options: Any) -> dict[str, Any]:
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "attention": attention, "dropout": 0.2}
    return spec("Transformer", **sizes | options)


TASKS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pixels": (
        spec("PixelModel", backbone=_backbone("LinearAttention")),
        spec("PixelSequences", dataset="digits", eval_batch_size=45),
    ),
    "classes": (
        spec("SequenceClassifier", backbone=_backbone("PerformerAttention", causal=False), label_smoothing=0.1),
        spec("LabelledImages", dataset="digits", eval_batch_size=45),
    ),
    "text": (
        spec(
            "LanguageModel",
            backbone=_backbone(spec("TransformerXLAttention", mem_len=6), positions=None, n_layers=2),
            tie=True,
        ),
        spec("TextStream", source="files", root="texts", segment_len=8, eval_batch_size=4),
    ),
    "speech": (
        spec(
            "SpeechRecognizer",
            backbone=_backbone("LinearAttention", causal=False),
            front_end=spec("ConvSubsampling", factor=2, channels=4),
        ),
        spec(
            "SpeechData",
            corpus=spec("tests.support.tones.Tones", n=24),
            normalize="corpus",
            eval_batch_frames=200,
            spec_augment=spec("SpecAugment", freq_mask=4, time_mask=3),
            wave_augment=spec("WaveAugment", speed=[0.95, 1.05]),
        ),
    ),
    "sorting": (
        spec(
            "LanguageModel",
            backbone=_backbone(
                spec(
                    "InfiniteAttention",
                    mem_len=8,
                    segment_len=16,
                    n_basis=8,
                    widths=[0.1],
                    n_samples=16,
                    chunk_size=16,
                    sticky=True,
                ),
                positions=None,
            ),
            accuracy=True,
        ),
        spec("SortingTask", length=60, n_types=4, segment_len=16, eval_batch_size=8, n_train=24, n_val=16, n_test=16),
    ),
    "pairs": (
        spec(
            "SequenceToSequence",
            backbone=spec(
                "EncoderDecoder",
                encoder=_backbone("LinearAttention", causal=False),
                decoder=_backbone("LinearAttention", cross_attention="PerformerCrossAttention"),
            ),
            label_smoothing=0.1,
            decode_every_n_epochs=2,
            beam=2,
        ),
        spec("SequencePairs", corpus="files", root="pairs", eval_batch_tokens=60, cache="cache"),
    ),
}
"""The model and the data of each task."""


def write_data() -> None:
    """Write the data of the tasks into the current folder."""
    rng = np.random.default_rng(0)
    for split, sizes in (("train", (90, 40, 160, 70)), ("val", (60, 30)), ("test", (30,))):
        for i, n in enumerate(sizes):
            path = Path("texts", split, f"{i}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(rng.choice(list("abcdefgh \n"), n)))
    Path("pairs").mkdir()
    for split, n in (("train", 100), ("val", 40), ("test", 10)):
        words = ["".join(rng.choice(list("abcd"), 5)) for _ in range(n)]  # of one length: ten batches of ten
        Path("pairs", f"{split}.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    Tones(n=24).prepare()


def start(settings: Settings, folder: Path) -> list[str]:
    """Return the arguments of a new run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings.config()))
    return ["fit", "--config", str(config), "--trainer.default_root_dir", str(folder / "runs")]


def newest(folder: Path) -> Path | None:
    """Return the run that `--ckpt_path last` resumes, or None."""
    try:
        return find_checkpoint("last", folder / "runs").parent.parent
    except FileNotFoundError:
        return None
