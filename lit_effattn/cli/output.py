"""Warnings and log messages of Lightning and torch, as users of the command get them."""

import logging
import threading
import warnings

from lit_effattn.checkpoints.printable import PrintableRecords, printable

_REMARKS = (
    *("💡", "number of stepping batches"),  # advertisements; schedules without a number of steps
    *("GPU available: False", "TPU available: False"),  # devices that are not used
    # The command names the checkpoint itself.
    *("Restoring states from", "Restored all states from", "Loaded model weights from"),
    "was configured so",  # repeats a flag
)
"""Messages of Lightning without information for users of the command."""

_TENSOR_CORES = (
    "float32 matrices are multiplied in full precision. Faster on this GPU: --trainer.precision bf16-mixed; or TF32, "
    "with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment"
)
"""Replaces Lightning's advice to call a function of PyTorch."""


def quieten() -> None:
    """Suppress warnings that users of the command cannot act upon, each for the reason in its comment."""
    for message in (
        ".*LightningCLI's args parameter is intended to run from within Python.*",  # as here
        ".*does not have many workers.*",  # images in memory need none
        ".*callbacks used to create the checkpoint need to be provided.*",  # scoring needs none
        ".*Checkpoint directory .* exists and is not empty.*",  # of a resumed run
        ".*The dirpath has changed from .*",  # of a new run from a checkpoint of another
        ".*is not supported by the model summary.*",  # our summary shows no size in MB
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # Lightning's own call
        ".*WeightAveraging doesn't support sharding.*",  # which is an error here, if the model is sharded
        ".*is smaller than the logging interval.*",  # steps are counted across epochs, so metrics are logged
    ):
        warnings.filterwarnings("ignore", message)
    # As one line, without its place in the code.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(known, PrintableRecords) for known in handler.filters):
                handler.addFilter(PrintableRecords())
    threading.excepthook = _report_thread
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_for_users)
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").addFilter(
        lambda r: "`weights_only` was not set" not in r.getMessage()
    )


def _for_users(record: logging.LogRecord) -> bool:
    """Return whether the command shows a message of Lightning; replace the one about Tensor Cores."""
    message = record.getMessage()
    if "that has Tensor Cores" in message:
        record.msg, record.args = _TENSOR_CORES, ()
    return not any(remark in message for remark in _REMARKS)


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Report an exception in a thread, except TensorBoard's missing file, which the main thread raises again."""
    if failed.exc_type is not FileNotFoundError:
        threading.__excepthook__(failed)
