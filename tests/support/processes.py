"""Processes of tests, forked from one server: it imports torch and the command once for all of them."""

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
import torch.multiprocessing as mp

from lit_effattn.ops.runtime import cpp_build

SUPPORT = Path(__file__).parent
SECONDS = 300
"""After which processes are killed."""

multiprocessing.set_forkserver_preload(["tests.support.first_imports", "lit_effattn.cli.command", "pytest"])


def in_processes(work: Callable[..., None], *args: Any, n: int) -> None:
    """Run `work(rank, *args)` in `n` processes."""
    mp.start_processes(work, args, nprocs=n, start_method="forkserver")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run_command(args: list[str], n: int = 1) -> CompletedProcess[str]:
    """Run `lit-effattn` in `n` processes, which are told of each other as Lightning's DDP tells those it starts.

    The result has the exit code of the first, and the output of all.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if n > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(n), "NODE_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/stdout", f"{folder}/stderr"]
        context = multiprocessing.get_context("forkserver")
        ranks = [environment | {"LOCAL_RANK": str(rank)} for rank in range(n)] if n > 1 else [environment]
        kernels = cpp_build.private_folder("kernels")
        processes = [context.Process(target=_command, args=(args, of_rank, outputs, kernels)) for of_rank in ranks]
        for process in processes:
            process.start()
        end = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        return CompletedProcess(args, processes[0].exitcode or 0, *(Path(path).read_text() for path in outputs))


def _command(args: list[str], environment: dict[str, str], outputs: list[str], kernels: Path) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    from lit_effattn.cli import main

    multiprocessing.set_start_method(None, force=True)  # workers of loaders start as in a command of its own
    cpp_build.private_folder = lambda name: kernels
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))  # as Lightning reads it when it is imported
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = ["lit-effattn", *args]
    sys.path.insert(0, str(SUPPORT))  # for `interruptions`
    torch.set_num_threads(1)
    main(args)
