"""Checkpoints of small runs of the command, one a task, for tests that change or read one. Each is made once."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.cli import main
from tests.support.commands import last, spec
from tests.support.tones import Tones

_TRANSFORMER: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_layers": 1}
_SMALLER = {**_TRANSFORMER, "d_model": 8}
_OPTIMIZATION = {
    "optimizer": spec("torch.optim.RAdam", lr=0.001),
    "lr_scheduler": spec("WarmupCosine", total_steps=40, warmup_steps=3),
}
_TRAINER = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "logger": False}

SETTINGS: dict[str, dict[str, Any]] = {
    "language": {
        "seed_everything": 3,
        "model": spec(
            "LanguageModel",
            backbone=spec(
                "Transformer", **_TRANSFORMER, attention=spec("TransformerXLAttention", mem_len=6, share_uv=True)
            ),
            tie=True,
            **_OPTIMIZATION,
        ),
        "data": spec(
            "TextStream", source="files", root="texts", tokens="characters", segment_len=8, batch_size=4, cache="cache"
        ),
        "trainer": {**_TRAINER, "callbacks": [{"class_path": "MemoryCarry"}]},
    },
    "pixels": {
        "seed_everything": 3,
        "model": spec(
            "PixelModel",
            backbone=spec(
                "Transformer",
                **_TRANSFORMER,
                attention=spec("PerformerAttention", n_features=8),
                positions="SinusoidalPositions",
            ),
            **_OPTIMIZATION,
        ),
        "data": spec("PixelSequences", dataset="digits", batch_size=128),
        "trainer": {**_TRAINER, "limit_train_batches": 3, "callbacks": [spec("FeatureRedraw", every_n_steps=2)]},
    },
    "speech": {
        "seed_everything": 0,
        "model": spec(
            "SpeechRecognizer",
            backbone=spec("Transformer", **_TRANSFORMER, attention="LinearAttention", causal=False),
            front_end=spec("ConvSubsampling", factor=2, channels=4),
            **_OPTIMIZATION,
        ),
        "data": spec(
            "SpeechData",
            corpus=spec("ManifestCorpus", train="train.jsonl", val="val.jsonl", test="test.jsonl"),
            normalize="corpus",
            cache=False,
            batch_frames=120,
        ),
        "trainer": _TRAINER,
    },
    "pairs": {
        "seed_everything": 3,
        "model": spec(
            "SequenceToSequence",
            backbone=spec(
                "EncoderDecoder",
                encoder=spec("Transformer", **_SMALLER, attention="LinearAttention", causal=False),
                decoder=spec(
                    "Transformer",
                    **_SMALLER,
                    attention="LinearAttention",
                    cross_attention={"class_path": "PerformerCrossAttention"},
                ),
            ),
            metrics=["error_rate"],
            **_OPTIMIZATION,
        ),
        "data": spec(
            "SequencePairs",
            corpus="files",
            root="pairs",
            source_tokens="characters",
            target_tokens="characters",
            batch_tokens=120,
        ),
        "trainer": _TRAINER,
    },
    "classes": {
        "seed_everything": 3,
        "model": spec("SequenceClassifier", backbone=spec("LSTM", d_model=8, n_layers=1), **_OPTIMIZATION),
        "data": spec("LabelledTexts", root="texts", batch_tokens=60, max_len=30),
        "trainer": _TRAINER,
    },
    "masked": {
        "seed_everything": 3,
        "model": spec(
            "MaskedLanguageModel",
            backbone=spec("Transformer", **_SMALLER, attention="SoftmaxAttention", causal=False, dropout=0.2),
            **_OPTIMIZATION,
        ),
        "data": spec(
            "TextStream",
            source="files",
            root="texts",
            tokens="characters",
            documents="whole",
            segment_len=64,
            batch_size=2,
        ),
        "trainer": _TRAINER,
    },
}


def write_data(task: str) -> None:
    """Write the data of a task into the current folder."""
    if task in ("language", "masked"):
        for split, sizes in (("train", (6, 1, 4)), ("val", (3,)), ("test", (2, 1))):
            for i, n in enumerate(sizes):
                path = Path("texts", split, f"{i}.txt")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{k} birds sit on {k * k} wires\n" for k in range(n)), encoding="utf-8")
    if task in ("pairs", "classes"):
        folder = Path({"pairs": "pairs", "classes": "texts"}[task])
        folder.mkdir()
        for split, n in (("train", 40), ("val", 9), ("test", 11)):
            lines = [f"{'ab'[i % 2] * (1 + i % 7)} {i % 10}\t{'AB'[i % 2]}\n" for i in range(n)]
            (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    if task == "speech":
        tones = Tones()
        tones.prepare()
        for split in ("train", "val", "test"):
            lines = [
                {"audio_filepath": str(u.audio), "phonemes": list(u.phones), "speaker": u.speaker}
                for u in tones.utterances(split)
            ]
            Path(f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="small-runs-")  # deleted when the process ends


@cache
def checkpoint(task: str) -> Path:
    """Return `last.ckpt` of a run of `SETTINGS[task]`."""
    folder = Path(_folder().name, task)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_data(task)
        Path(f"{task}.yaml").write_text(yaml.safe_dump(SETTINGS[task]), encoding="utf-8")
        main(["fit", "--config", f"{task}.yaml"])
        return last("runs").resolve()
