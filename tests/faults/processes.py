"""Running the command in processes that may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# Imported here so that the forked runs need not: most of the time of a run is imports.
import torch.utils.tensorboard

import lit_effattn.cli.command  # noqa: F401
from lit_effattn.cli import main
from tests.faults.moments import NOW, PLAN, STARTED

REPOSITORY = Path(__file__).parent.parent.parent
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
        if processes == 1:
            path = self.plan.resolve()
            self.pid = fork(lambda: _command(args, added, prepare and partial(prepare, path)), self.output)
        else:
            with self.output.open("a") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "lit_effattn.cli", *args],
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **added, "PYTHONPATH": str(REPOSITORY)},
                    start_new_session=True,
                )
            self.pid = self._process.pid

    def started(self) -> float | None:
        """Wait until the training starts. Return the seconds that it took, or None if the run ended before."""
        return time.monotonic() - self.begun if self._wrote(self.marker) else None

    def holds(self) -> bool:
        """Wait until the moment at which the plan holds the run. Return False if the run ended before."""
        return self._wrote(self.plan.with_name(NOW))

    def _wrote(self, path: Path) -> bool:
        while not path.exists():
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if ended or time.monotonic() - self.begun > PATIENCE:
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
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.begun > PATIENCE:
                self.kill()
                os.waitpid(self.pid, 0)
                return None
            time.sleep(0.005)
        self.seconds = time.monotonic() - self.begun
        self.kill()  # a process that outlives the first
        return os.waitstatus_to_exitcode(status)


def fork(function: Callable[[], None], output: Path) -> int:
    """Run `function` in a forked process with a session of its own; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def in_fork(function: Callable[[], Any], folder: Path) -> Any:
    """Return the result of `function`, which must be plain data, computed in a forked process.

    So this process itself runs no operation of PyTorch, whose threads would not survive a fork.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    pid = fork(lambda: result.write_text(json.dumps(function())) and None, folder / "output.txt")
    os.waitpid(pid, 0)
    return json.loads(result.read_text())


def _command(args: Sequence[str], environment: dict[str, str], prepare: Callable[[], None] | None) -> None:
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    main(list(args))
