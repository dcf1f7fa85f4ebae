"""Messages for failures of the machine, such as full memory and killed processes, and for errors of Lightning."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from lit_effattn.checkpoints.runs import deleted_run, short

_OF_TRAINER = (
    (
        r"No supported (gpu) backend found|`(CUDA)Accelerator` can not run on your system",
        "--trainer.accelerator {0}: torch {torch} finds no GPU that it can use; leave the option out to compute on the "
        "CPU, or install a torch for this machine's driver",
    ),
    (
        r"invalid accelerator name: `accelerator='(.*?)'`. Available names are: (.*)\.",
        "--trainer.accelerator {0}: there is no such accelerator; there are {1}",
    ),
    (
        r"invalid strategy name: `strategy='(.*?)'`.*Example choices: (.*?), \.\.\.",
        "--trainer.strategy {0}: there is no such strategy; there are {1} and others",
    ),
    (
        r"`val_check_interval` \((\S+)\) must be less than or equal to the number of the training batches \((\d+)\)",
        "--trainer.val_check_interval {0} is more than the {1} training batches of an epoch: give {1} or fewer, "
        "--trainer.check_val_every_n_epoch null to count batches over epochs, or --trainer.limit_val_batches 0 to "
        "validate never",
    ),
    (
        r"You requested to check (\S+) of the `.*`(\w+_batches)` argument\. Try at least `\w+=(\S+)`",
        "--trainer.{1} {0} of the batches is less than one: give {2} or more, or an integer, the number of batches",
    ),
    (
        r"When using an `IterableDataset`, `Trainer\((\w+_batches)\)` must be `1.0` or an int",
        "--trainer.{0} must be a number of batches: these data have no length of which it could be a fraction",
    ),
    (
        r"`(max_\w+)` must be a non-negative integer or -1 .* You passed in (\S+)\.",
        "--trainer.{0} {1}: give a number of at least 0, or -1 for no limit",
    ),
)
"""Messages of Lightning's trainer, which name arguments in Python, and ours, which name flags."""


def in_flags(message: str) -> str:
    """Return a message of Lightning's trainer in terms of flags; other messages unchanged."""
    for pattern, ours in _OF_TRAINER:
        if match := re.search(pattern, message, re.DOTALL):
            return ours.format(*(part.lower() for part in match.groups() if part is not None), torch=torch.__version__)
    return message


def explained(error: RuntimeError | OSError, command: str) -> str | None:
    """Return the message for a failure of the machine during `command`; None if `error` is another one."""
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
        return (
            f"{where} has not enough memory ({text.partition('. GPU')[0]}). Use a smaller {smaller}, or "
            f"--trainer.precision bf16-mixed{resume}"
        )
    if match := re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.+?)\.? ?$", text.partition(". It is")[0]):
        cause = f"a process that loads data ({match[1]}) {match[2]}"
        return f"{cause}. If memory ran out, use fewer --data.num_workers{resume}"
    if match := re.search(r"You provided multiple `(\w+_dataloader)`", text):
        return f"{match[1]} returned several loaders, but a task reads one; join their data sets by ConcatDataset"
    if match := re.search(r"conditioned on metric `(.+?)` which is not available.*following: (.*)", text):
        known = ", ".join(sorted(re.findall(r"`([^`]+)`", match[2])))
        return f"EarlyStopping: there is no metric monitor={match[1]}; there are {known}"
    if "does not support dense gradients" in text:
        return f"--model.optimizer: {text}"
    if re.search(r"/gloo/transport/|Connection (closed|reset) by peer|ncclRemoteError|remote process exited", text):
        return (
            f"another process of this run ended ({text[:120]}). Its output above names the reason; without output, "
            f"it was killed, perhaps because memory ran out{resume}"
        )
    return None
