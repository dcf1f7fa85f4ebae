import os
import signal
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lit_effattn.cli.failures import explained
from lit_effattn.cli.output import _report_thread
from tests.support.commands import fails


class Dying(Dataset[int]):
    """A data set whose process is killed, as by a machine that runs out of memory."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return i


def test_a_loader_s_process_that_was_killed():
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Dying(), num_workers=1)))
    output = explained(caught.value, "fit")
    assert output is not None
    assert output.startswith("DataLoader worker")
    assert output.endswith("num_workers; if the run has saved a checkpoint, resume with --ckpt_path last)")


def test_memory_that_does_not_suffice():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    output = explained(caught.value, "fit")
    assert output is not None
    assert "(use a smaller batch" in output
    gpu = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
    )
    output = explained(gpu, "generate")
    assert output is not None
    assert output.startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB (use"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:33115",
        "NCCL communicator was aborted on rank 0. remote process exited or there was a network error",
    ],
)
def test_another_process_of_the_run_ended(text: str):
    output = explained(RuntimeError(text), "fit")
    assert output is not None
    assert "another process of this run ended" in output


def test_a_missing_file_of_a_thread_is_not_reported(capsys: pytest.CaptureFixture[str]):
    for kind in (FileNotFoundError, KeyError):
        _report_thread(threading.ExceptHookArgs((kind, kind("x"), None, None)))
        assert ("Error" in capsys.readouterr().err) == (kind is KeyError)


def test_what_is_no_failure_of_the_machine_keeps_its_traceback():
    assert all(explained(RuntimeError(text), "fit") is None for text in ("mat1 and mat2", "an igloo without NCCL"))


def test_an_error_with_a_remedy_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(args: list[str]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("lit_effattn.cli.command.run", run)
    assert "(use a smaller batch" in fails(capsys, "fit")
