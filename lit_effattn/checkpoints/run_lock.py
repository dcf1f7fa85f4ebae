"""The lock on a run's folder: one `fit` at a time writes into it, on all machines whose file system shares its locks.

The operating system releases the lock when its process ends, also after SIGKILL. `fit.lock` stays in the folder:
deleting it would let two processes lock two files of that name. `fit.holder` says who holds the lock.
"""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.runs import LOCK, short, small_text

HOLDER = "fit.holder"  # the file in the folder of a run that describes the process that holds the lock

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLockedError(OSError):
    """Another process trains in the folder of this run. The message names the process and the remedy."""


class RunLock:
    """The lock on the folder of a run, held until `release`, or until the process ends.

    The folder exists. Where the file system has no locks, a warning is given and nothing is locked.

    Raises:
        RunLockedError: If another process holds the lock.
        OSError: If the folder can't be written to.
    """

    def __init__(self, run: Path) -> None:
        self._holder = run / HOLDER
        # A soft lock, which filelock takes where there are no others, would outlive a process that was killed.
        self._lock = FileLock(run / LOCK, timeout=0, fallback_to_soft=False)
        try:
            self._lock.acquire()
            job = slurm.job()
            with whole(self._holder) as part:
                about = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
                part.write_text(about, encoding="utf-8")
        except Timeout as error:
            raise RunLockedError(
                f"another fit writes into {short(run)}: {self._described()}. Wait for its end or stop it, then resume; "
                "or begin a new run, with --init_weights or without a checkpoint"
            ) from error
        except (OSError, NotImplementedError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOSYS
            if number not in _WITHOUT_LOCKS:
                raise
            rank_zero_warn(
                f"{short(run)} is on a file system without locks ({os.strerror(number)}), so a second fit in this "
                "folder is not noticed: start none while this one runs"
            )

    def _described(self) -> str:
        try:
            return small_text(self._holder)[:200] or "an unknown process"
        except (OSError, ValueError):
            return "an unknown process"

    def release(self) -> None:
        """Release the lock."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._holder.unlink()
            self._lock.release()
