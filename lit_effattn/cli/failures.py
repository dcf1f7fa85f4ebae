"""Messages for failures of the machine, such as full memory and killed processes, and of Lightning."""

import torch

_REMEDIES = {
    **dict.fromkeys(
        ("out of memory", "can't allocate memory"),
        "use a smaller batch (--data.batch_size with --trainer.accumulate_grad_batches), fewer samples, or "
        "--trainer.precision bf16-mixed",
    ),
    "DataLoader worker": "if memory ran out, use fewer --data.num_workers",
    **dict.fromkeys(
        ("/gloo/transport/", "Connection closed by peer", "Connection reset by peer", "remote process exited"),
        "another process of this run ended; its output above names the reason, or it was killed",
    ),
    # Lightning and torch raise RuntimeErrors for settings too.
    **dict.fromkeys(("You provided multiple", "conditioned on metric", "does not support dense gradients"), ""),
}
"""Parts of messages that need no traceback, and what to do."""


def explained(error: RuntimeError, command: str) -> str | None:
    """Return the message for a failure of the machine during `command`; None if `error` is another one."""
    text = " ".join(str(error).split())
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in text), None)
    if remedy is None and isinstance(error, torch.OutOfMemoryError):
        remedy = _REMEDIES["out of memory"]
    if remedy and command == "fit":
        remedy += "; if the run has saved a checkpoint, resume with --ckpt_path last"
    return None if remedy is None else f"{text} ({remedy})" if remedy else text
