import gc
import os
import signal
import tempfile

import pytest
import torch

from lit_effattn.ops.runtime import cpp_build

_state = tempfile.TemporaryDirectory(prefix="state-")  # of the runs of these tests; deleted when the process ends
os.environ["XDG_STATE_HOME"] = _state.name

cpp_build.private_folder("kernels")  # before tests change XDG_CACHE_HOME: kernels are compiled once

if not torch.cuda.is_available():
    # Triton asks once, when it is imported: its kernels then run in Python, so that they are tested without a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores SIGINT, and so do its children: tests that send one need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.fsync = lambda descriptor: None  # no test loses power; to wait for the disk took 5 ms a file

# A loader that is garbage waits for its workers, which look this often, in seconds, whether they should end.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

for _device in (torch.cuda, torch.mtia, torch.xpu):
    if not _device.is_available():  # torch.manual_seed would keep a stack trace for each: 1 ms a call
        _device.manual_seed_all = lambda seed: None


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and leave modules and tests out: looking through them took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True)
def _repeatable():
    """One thread (tests run side by side; small tensors gain nothing from more), one seed, no mode of a test before.

    `make test-machines` sets the number of threads."""
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
