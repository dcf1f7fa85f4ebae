"""The lock on a run's folder: one `fit` at a time writes into it, on all machines that see the folder.

The lock is a file in the folder with the host, the process and the start time of that process. Locks of the operating
system are not used, since file systems of clusters (NFS) may lack them. A thread of the holder renews the file's time.

A holder that has ended is superseded: on the same host if its process no longer exists, so at once after SIGKILL; on
another host if the file was not renewed for a while, by the clock of the file system; or if SLURM or torchrun started
its job again. A holder that was stopped for long, and then finds that it was superseded, ends.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_effattn.checkpoints import slurm
from lit_effattn.checkpoints.runs import short, small_text

LOCK = "fit.lock"
"""The name of the file in the folder of a run."""

RENEWED_EVERY = 15.0
"""Seconds."""

STALE_AFTER = 120.0
"""Seconds without a renewal after which a holder on another host counts as ended."""

GUARD_STALE_AFTER = 10.0
"""Seconds after which a process that was superseding another counts as ended."""


class RunLockedError(OSError):
    """Another process trains in the folder of this run. The message names the process and the remedy."""


class RunLock:
    """The lock on the folder of a run, held until `release`, or until the process ends.

    Args:
        run: The folder, which exists.

    Raises:
        RunLockedError: If another process holds the lock.
        OSError: If the folder can't be written to.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / LOCK
        self._about = {**_me(), "token": secrets.token_hex(8)}
        self._ended = threading.Event()
        try:
            while not self._take(self.path):
                holder = _read(self.path)
                if (who := _alive(self.path, holder)) is not None:
                    raise RunLockedError(
                        f"another fit writes into {short(run)}: {who}. Wait for its end or stop it, then resume; or "
                        "begin a new run, with --init_weights or without a checkpoint"
                    )
                if self._supersede(holder):
                    break
                time.sleep(0.02)
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                raise _unwritable(run, error) from error
            raise
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def _take(self, path: Path) -> bool:
        """Create the file in one step; return False if it exists."""
        with self._written() as part:
            try:
                os.link(part, path)  # fails if the file exists, over NFS too
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                return self._take_exclusively(path)
            return True

    def _take_exclusively(self, path: Path) -> bool:
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self._about, file)
        except FileExistsError:
            return False
        return True

    def _supersede(self, holder: dict[str, Any]) -> bool:
        """Replace the file of a holder that has ended; return False if another process has done so.

        The file exists throughout, so no other process can take it. A second file, the guard, admits one process at a
        time; the guard of a process that was killed here expires after a few seconds.
        """
        guard = self.path.with_name(f"{LOCK}.taken_over")
        if not self._take(guard):
            with suppress(FileNotFoundError):
                if _age(guard, guard.stat().st_mtime) > GUARD_STALE_AFTER:
                    guard.unlink()
            return False
        try:
            if not self.path.exists() or _read(self.path) != holder:
                return False
            with self._written() as part:
                part.replace(self.path)
            return True
        finally:
            guard.unlink(missing_ok=True)

    @contextmanager
    def _written(self) -> Iterator[Path]:
        """Write the identity of this process into a temporary file beside the lock."""
        handle, name = tempfile.mkstemp(prefix=f".{LOCK}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self._about, file)
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY):
            with suppress(OSError):
                os.utime(self.path)

    def verify(self) -> None:
        """Check that this process still holds the lock.

        Raises:
            RunLockedError: If another process has taken it, or the file was deleted.
        """
        holder = _read(self.path)
        if holder.get("token") != self._about["token"]:
            who = _describe(holder) if holder else f"nobody, since {self.path} was deleted"
            raise RunLockedError(
                f"this process no longer holds the lock on {short(self.path.parent)}: it is held by {who}"
            )

    def release(self) -> None:
        """Delete the file, if this process still holds the lock."""
        self._ended.set()
        with suppress(OSError):
            if _read(self.path).get("token") == self._about["token"]:
                self.path.unlink()


def _unwritable(run: Path, error: OSError) -> PermissionError:
    return PermissionError(
        f"{short(run)} can't be written to ({error.strerror}), so its run can't resume there: copy its folder "
        "to another place, or begin a new run from its weights with --init_weights"
    )


def _me() -> dict[str, Any]:
    """Return the identity of this process."""
    return {
        "host": socket.gethostname(),
        "system": _system(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": slurm.job(),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "launch": slurm.launch(),
    }


def _alive(path: Path, holder: dict[str, Any]) -> str | None:
    """Describe the holder of the lock; None if that process has ended or released it."""
    try:
        renewed = path.stat().st_mtime
    except FileNotFoundError:
        return None
    me = _me()
    if os.name != "nt" and all(holder.get(name) == me[name] for name in ("host", "system")):
        started = _started(holder.get("pid"))
        alive = started is not None and started == holder.get("started") and holder["pid"] != me["pid"]
    else:
        alive = not _was_restarted(holder, me) and _age(path, renewed) < STALE_AFTER
    return f"{_describe(holder)}, renewed {max(_age(path, renewed), 0):.0f} s ago ({short(path)})" if alive else None


def _was_restarted(holder: dict[str, Any], me: dict[str, Any]) -> bool:
    """Return whether this process is of the same job or launch as the holder, started again."""
    if me["launch"] is not None and holder.get("launch") == me["launch"]:
        return True  # it has one first process at a time
    before = holder.get("restart")
    return me["job"] is not None and holder.get("job") == me["job"] and type(before) is int and before < me["restart"]


def _describe(holder: dict[str, Any]) -> str:
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', 'of an unknown number')} on {holder.get('host', 'an unknown host')}{job}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(small_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _age(path: Path, renewed: float) -> float:
    """Return the seconds since a file was renewed, by the clock of its file system."""
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - renewed


def _system() -> str:
    """Return an identity of this boot of the machine and of this container; host names need not be unique."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _started(process: Any) -> str | None:
    """Return when a process of this host started, in any unit; None if it has ended or never was."""
    if type(process) is not int or process <= 0:
        return None
    try:
        # The name, in parentheses, may have any characters. What follows: the state, and 19 fields on the start.
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        with suppress(OSError):  # macOS
            command = ["ps", "-o", "lstart=", "-p", str(process)]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
        return None
    return None if fields[0] in "ZX" else fields[19]
