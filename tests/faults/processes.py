"""Running the command in processes that may be killed."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Imported here so that the forked runs need not: most of the time of a run is imports.
import torch.utils.tensorboard

import lit_effattn.cli.command  # noqa: F401
from lit_effattn.cli import main
from tests.faults.moments import NOW, PLAN, STARTED

REPOSITORY = Path(__file__).parent.parent.parent
FORK = get_context("fork")
PATIENCE = 120
"""Seconds after which a run that does not end is killed."""


class Run:
    """A run of the command in a process group of its own.

    One process is forked from this one, which has imported everything. Two processes are started by the command, as a
    user would start them.

    Args:
        args: The arguments of the command.
        processes: 1 or 2.
        folder: Folder for the output, the plan (see `Fault`) and the cache.
        cache: Folder for prepared data.
        plan: What the callback `Fault` is to do, or None.
        environment: Further variables.
        prepare: Called in the forked process with the path of the plan.
    """

    def __init__(
        self,
        args: Sequence[str],
        processes: int,
        folder: Path,
        cache: Path,
        plan: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[Path], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.plan, self.marker = folder / "output.txt", folder / "plan.json", folder / "started.txt"
        self.plan.unlink(missing_ok=True)
        self.marker.unlink(missing_ok=True)
        if plan is not None:
            self.plan.write_text(json.dumps(plan))
        added = {
            PLAN: str(self.plan.resolve()),
            STARTED: str(self.marker.resolve()),
            "XDG_CACHE_HOME": str(cache.resolve()),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._planned = plan is not None
        self.begun = time.monotonic()
        prepared = prepare and partial(prepare, self.plan.resolve())
        self._process = FORK.Process(target=_command, args=(list(args), processes, added, prepared, self.output))
        self._process.start()
        self.pid: Any = self._process.pid

    def started(self) -> float | None:
        """Wait until the training starts. Return the seconds that it took, or None if the run ended before."""
        return time.monotonic() - self.begun if self._wrote(self.marker) else None

    def holds(self) -> bool:
        """Wait until the moment at which the plan holds the run. Return False if the run ended before."""
        return self._wrote(self.plan.with_name(NOW))

    def _wrote(self, path: Path) -> bool:
        while not path.exists():
            if not self._process.is_alive() or time.monotonic() - self.begun > PATIENCE:
                return False
            time.sleep(0.005)
        return True

    def interrupted(self, code: int) -> bool:
        """Return whether the run, which ended with `code`, was interrupted: by its plan or from outside."""
        return not self.plan.exists() if self._planned else code == -signal.SIGKILL

    def kill(self) -> None:
        """Kill all processes of the run."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for the end. Return the exit code, −n if signal n killed it, or None if it did not end in time."""
        self._process.join(max(0.0, self.begun + PATIENCE - time.monotonic()))
        code = self._process.exitcode
        self.seconds = time.monotonic() - self.begun
        self.kill()  # also a process that outlives the first
        self._process.join()
        return code


def _command(
    args: list[str],
    processes: int,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
    output: Path,
) -> None:
    """Run the command in this process, or in its place as a program that starts the second process itself."""
    os.setsid()
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if processes > 1:
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        os.execv(sys.executable, [sys.executable, "-m", "lit_effattn.cli", *args])
    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    main(args)


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function, computed in a forked process.

    So this process itself runs no operation of PyTorch, whose threads would not survive a fork.
    """
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(function, *args).result()
