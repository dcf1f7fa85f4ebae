r"""Rows of the table of docs/proteins.md: language models of proteins, trained for equal time or steps, and tested.

    python -m scripts.proteins_table --root data/proteins/all --task masked --kind softmax --seconds 1800
    python -m scripts.proteins_table --root data/proteins/all --task causal --kind performer_relu --steps 2000

A row is one line of JSON on the standard output. Seconds are those of the processor on a CPU, with one thread, and of
the clock on a GPU; the time of thirty steps says how many they are, so that the schedule of the learning rate ends
with them. All rows have the same width, layers, batches and learning rate. The peak of memory, in MB, is that of the
process on a CPU, and that of tensors on a GPU. Sequences joined to 8,192 residues, as in Choromanski et al. 2020,
section 4.4:

    python -m scripts.proteins_table --root data/proteins/all --task causal --kind softmax --steps 10 \
      --documents joined --segment_len 8192 --batch_size 1
"""

import json
import resource
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import nn

from lit_effattn import LSTM, LanguageModel, MaskedLanguageModel, Transformer
from lit_effattn.attention import GatedDeltaNetAttention, LinearAttention, PerformerAttention, SoftmaxAttention
from lit_effattn.datamodules import TextStream
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks.base import Task
from lit_effattn.tasks.schedules import WarmupCosine
from scripts import documented_parser

KINDS: dict[str, Any] = {
    "softmax": SoftmaxAttention,
    "performer": PerformerAttention,
    "performer_relu": partial(PerformerAttention, features="relu"),
    "linear": LinearAttention,
    "gated_delta": GatedDeltaNetAttention,
}
_TIMED = 30  # steps whose time is measured, after two


def model(given: Any, data: TextStream, steps: int) -> Task:
    """Make the model of a row."""
    seed_everything(given.seed, verbose=False)
    causal = given.task == "causal"
    if given.kind == "lstm":
        backbone: Any = LSTM(given.d_model, given.n_layers, causal=causal)
    else:
        sizes = (given.d_model, given.d_model // 32, given.n_layers)
        backbone = Transformer(*sizes, attention=KINDS[given.kind], causal=causal, positions="auto")
    options: dict[str, Any] = {
        "vocab_size": data.vocab_size,
        "tokenizer": data.tokenizer,
        "tie": True,
        "optimizer": partial(torch.optim.AdamW, lr=given.lr, weight_decay=0.05),
        "lr_scheduler": partial(WarmupCosine, total_steps=steps, warmup_steps=max(1, steps // 20)),
    }
    if causal:
        return LanguageModel(backbone, unit="token", accuracy=True, **options)
    return MaskedLanguageModel(backbone, **options)


def seconds_a_step(task: Task, data: TextStream, device: torch.device, precision: str) -> float:
    """Return the mean time of a training step."""
    task = task.to(device).train()
    optimizer: Any = torch.optim.AdamW(task.parameters(), lr=0.0)
    batches, begin = cycle(data.train_dataloader()), 0.0
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for step in range(2 + _TIMED):
        if step == 2:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = clock()
        batch = next(batches)
        batch = batch._replace(**{n: t.to(device) for n, t in batch._asdict().items() if isinstance(t, torch.Tensor)})
        with torch.autocast(device.type, torch.bfloat16, enabled=precision != "32-true"):
            task.objective(batch).loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) / _TIMED


def row(given: Any) -> dict[str, Any]:
    """Train and test a model, and return its figures."""
    data = TextStream(
        "files",
        root=given.root,
        tokens="amino_acids",
        documents=given.documents,
        segment_len=given.segment_len,
        batch_size=given.batch_size,
        shuffle_seed=given.seed,
    )
    data.prepare_data()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds, steps = seconds_a_step(model(given, data, 1), data, device, given.precision), given.steps
    if given.seconds is not None:
        steps = max(1, round(given.seconds / seconds))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        max_steps=steps,
        max_time=given.limit and {"seconds": given.limit},
        gradient_clip_val=1.0,
        precision=given.precision,
        devices=1,
        limit_val_batches=0,
        enable_model_summary=False,
        **quiet,
    )
    task, begin, used = model(given, data, steps), time.perf_counter(), time.process_time()
    trainer.fit(task, data)
    figures = {"seconds": round(time.perf_counter() - begin), "cpu_seconds": round(time.process_time() - used)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    (tested,) = trainer.test(task, data, verbose=False)
    names = {name: value for name, value in vars(given).items() if name not in ("root", "steps", "seconds", "limit")}
    figures |= {"steps": trainer.global_step, "ms_a_step": round(1000 * seconds, 1), "peak_mb": round(peak / 1e6)}
    parameters = sum(p.numel() for p in task.parameters())
    scores = {name.removeprefix("test/"): round(value, 5) for name, value in tested.items()}
    return {**names, "parameters": parameters, **figures, **scores}


def main(args: Sequence[str] | None = None) -> None:
    """Print a row."""
    parser = documented_parser(__doc__)
    parser.add_argument("--root", required=True, help="Folder of the FASTA files: see scripts.proteins.")
    parser.add_argument("--task", choices=["causal", "masked"], required=True)
    parser.add_argument("--kind", choices=[*KINDS, "lstm"], required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--seconds", type=float)
    for name, default in (("d_model", 128), ("n_layers", 3), ("segment_len", 1024), ("batch_size", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=int, help="Seconds after which training ends at any rate.")
    parser.add_argument("--documents", default="whole", help="See TextStream.")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--precision", default="32-true", help="See lightning.pytorch.Trainer; bf16-mixed on a GPU.")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    print(json.dumps(row(given)), flush=True)


if __name__ == "__main__":
    main()
