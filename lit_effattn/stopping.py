"""Signals that stop a process: SIGTERM, Ctrl-C (SIGINT), SIGUSR1 and SIGHUP, with one rule for all commands.

The process exits with 128 + the signal's number, as shells expect. A command stops at once, a training run after its
step (`lit_effattn.callbacks.StopOnSignal`). Later signals are ignored, but a second Ctrl-C stops at once. A signal that
was ignored when the command started, as `nohup` ignores SIGHUP, stays ignored.

Processes that are forked meanwhile, such as those of a data loader, ignore signals to the process group: their parent
stops, and ends them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)  # Windows lacks the last two

SAME = 0.5
"""Seconds within which two SIGINT are one: `timeout -s INT` sends one to its process and one to the process group."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


class Stopped(SystemExit):
    """Raised if a signal stops the process. The process exits with 128 + the signal's number.

    In a run of several processes the first one does; the others exit with 0, since launchers kill all processes of a
    run, even one that is saving, if one of them reports a failure.

    Args:
        number: The signal's number.
        message: Where the run stopped, if that was printed.
        job: The number of the SLURM job to requeue when the run is saved.
    """

    def __init__(self, number: int, message: str = "", job: str | None = None) -> None:
        is_first = not any(int(os.environ.get(name) or 0) for name in _RANKS)
        super().__init__(128 + number if is_first else 0)
        self.name = signal.Signals(number).name
        self.message = message
        self.job = job


class Receiver:
    """A signal handler that calls `first` at the first signal, and raises KeyboardInterrupt at a second Ctrl-C.

    Attributes:
        number: The first signal's number; 0 before.
    """

    def __init__(self, first: Callable[[int], None]) -> None:
        self.number = 0
        self._first = first
        self._time = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Receive a signal."""
        if not self.number:
            self.number, self._time = number, time.monotonic()
            self._first(number)
        elif number == signal.SIGINT and time.monotonic() - self._time > SAME:
            raise KeyboardInterrupt


_handled: list[dict[int, Any]] = []
"""The earlier handlers of each caller of `handle`. Forked processes ignore signals while there are any."""


def handle(receiver: Receiver | None) -> Callable[[], None]:
    """Let `receiver` handle all of `SIGNALS` that are not ignored, until the returned function is called.

    None changes no handler: only processes that are forked meanwhile ignore signals. Outside the main thread, which
    alone may handle signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    numbers = [number for number in SIGNALS if receiver and signal.getsignal(number) != signal.SIG_IGN]
    previous: dict[int, Any] = {number: signal.signal(number, receiver) for number in numbers}
    _handled.append(previous)

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())
        _handled[:] = [earlier for earlier in _handled if earlier is not previous]

    return restore


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` in the context at the first signal."""

    def stop(number: int) -> None:
        raise Stopped(number)

    restore = handle(Receiver(stop))
    try:
        yield
    finally:
        restore()


def _leave_signals_to_parent() -> None:
    """In a forked process: ignore signals, except SIGTERM of the parent, by which it ends its processes."""
    if not _handled:
        return
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        # Blocked, not handled: PyTorch sets a handler of its own, by which SIGTERM of others ends a loader's process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_signals_to_parent)
