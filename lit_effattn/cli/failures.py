"""Messages for failures of the machine, whose tracebacks don't help: full memory, processes that were killed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from lit_effattn.runs import deleted_run, short


def explained(error: RuntimeError | OSError, command: str) -> str | None:
    """Return what to say of a failure of the machine during `command`; None if `error` is something else."""
    if isinstance(error, OSError):
        run = deleted_run(Path(os.fsdecode(error.filename))) if isinstance(error.filename, (str, bytes)) else None
        return None if run is None else f"the folder of this run, {short(run)}, was deleted while the run wrote to it"
    text = " ".join(str(error).split())
    training = command == "fit"
    resume = ". If the run has saved a checkpoint, resume with --ckpt_path last" if training else ""
    on_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in text
    if on_gpu or "can't allocate memory" in text:
        where = "the GPU" if on_gpu else "this machine"
        smaller = "--data.batch_size with --trainer.accumulate_grad_batches" if training else "batch, or fewer samples"
        said = f"{where} has not enough memory ({text.partition('. GPU')[0]})"
        return f"{said}. Use a smaller {smaller}, or --trainer.precision bf16-mixed{resume}"
    if match := re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.+?)\.? ?$", text.partition(". It is")[0]):
        said = f"a process that loads data ({match[1]}) {match[2]}"
        return f"{said}. If memory ran out, use fewer --data.num_workers{resume}"
    if match := re.search(r"conditioned on metric `(.+?)` which is not available.*following: (.*)", text):
        known = ", ".join(sorted(re.findall(r"`([^`]+)`", match[2])))
        return f"EarlyStopping: there is no metric monitor={match[1]}; there are {known}"
    if re.search(r"/gloo/transport/|Connection (closed|reset) by peer|ncclRemoteError|remote process exited", text):
        return (
            f"another process of this run ended ({text[:120]}). What it printed above says why; if it printed nothing, "
            f"it was killed, perhaps since memory ran out{resume}"
        )
    return None
