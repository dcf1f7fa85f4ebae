"""Runs of two machines: two launchers of torchrun, and two tasks of a SLURM job, on one machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.runs import is_checkpoint
from tests.cli.test_command import TINY
from tests.support.commands import REPOSITORY, assert_same_end, last
from tests.support.processes import free_port

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

NODES = [
    "--trainer.num_nodes",
    "2",
    "--trainer.devices",
    "1",
    "--trainer.accelerator",
    "cpu",
    "--trainer.strategy",
    "ddp",
]
STOP = ["--trainer.callbacks+=interruptions.SignalAt", "--trainer.callbacks.every_rank", "false"]


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cluster"))
        trainer = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_progress_bar": False, "logger": False}
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY | {"trainer": trainer}))  # 10 steps of 2 processes
        yield


def together(commands: list[tuple[list[str], dict[str, str]]]) -> list[int]:
    """Run commands at the same time, each with environment variables of its own; return their exit codes."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    common = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    common |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-m", *args], env=common | more) for args, more in commands]
    try:
        ends = time.monotonic() + 300
        return [process.wait(timeout=ends - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun then ends its own, and kills them after 30 s
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            process.kill()


def fit(root: str, step: int, number: signal.Signals) -> list[str]:
    at = [
        "--trainer.callbacks.once",
        f"{root}-was-stopped",
        "--trainer.callbacks.step",
        str(step),
        "--trainer.callbacks.number",
        str(int(number)),
    ]
    run = ["--trainer.default_root_dir", root, "--checkpoint.every_n_train_steps", "2"]
    return ["lit_effattn.cli", "fit", "--config", "tiny.yaml", *NODES, *run, *STOP, *at]


@pytest.fixture(scope="module")
def requeued() -> Path:
    """A SLURM job of two nodes that one of its tasks asks to stop at step 3, and that SLURM runs again."""
    Path("bin").mkdir()
    Path("bin/scontrol").write_text('#!/bin/sh\necho "$@" >> asked\n')
    Path("bin/scontrol").chmod(0o755)
    job = {"JOB_ID": "77", "JOB_NAME": "fit", "NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2", "LOCALID": "0"}
    job |= {"NODELIST": "127.0.0.1"}

    def srun(**more: str) -> list[int]:
        port = free_port()
        tasks = []
        for task in ("0", "1"):
            names = {f"SLURM_{name}": value for name, value in (job | more | {"PROCID": task, "NODEID": task}).items()}
            path = f"{Path('bin').resolve()}:{os.environ['PATH']}"
            tasks.append((fit("slurm", 3, signal.SIGUSR1), names | {"MASTER_PORT": port, "PATH": path}))
        return together(tasks)

    assert srun() == [138, 0]
    assert Path("asked").read_text() == "requeue 77\n"
    assert torch.load(last("slurm"), weights_only=True)["global_step"] == 4
    assert srun(RESTART_COUNT="1") == [0, 0]
    return last("slurm")  # of the only run


def test_torchrun_restarts_a_killed_process_of_two_nodes_in_the_same_run(requeued: Path):
    """It ends as the requeued SLURM job does, which was interrupted at another step."""
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--monitor-interval", "0.5"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "7"]
    launch += ["--local-addr", "127.0.0.1", "-m", *fit("torchrun", 7, signal.SIGKILL)]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/clusters.md, Elastic restarts
    assert together(2 * [(["torch.distributed.run", *launch], own_store)]) == [0, 0]
    assert torch.load(last("torchrun"), weights_only=True)["global_step"] == 10
    assert_same_end(last("torchrun"), requeued)


def test_all_processes_of_torchrun_go_on_from_the_parts_before_damaged_ones():
    parts = ["--trainer.strategy", "ModelParallelStrategy", "--trainer.strategy.save_distributed_checkpoint", "true"]
    where = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.default_root_dir", "divided"]

    def launch(*args: str) -> list[int]:
        several = ["--standalone", "--nproc-per-node", "2", "-m", "lit_effattn.cli", "fit"]
        return together([(["torch.distributed.run", *several, *args, *parts, *where], {})])

    assert launch("--config", "tiny.yaml") == [0]
    folder = last("divided").parent
    for part in (folder / "last.ckpt").glob("part_*.pt"):
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 4
        part.write_bytes(content)
    assert launch("--ckpt_path", "last", "--trainer.max_epochs", "3") == [0]
    assert read_checkpoint(folder / "previous.ckpt")["global_step"] == 10
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 15
    assert is_checkpoint(folder / "set_aside.ckpt")
