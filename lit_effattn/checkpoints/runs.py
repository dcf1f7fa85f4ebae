"""Folders of runs, and search for checkpoints.

A run has one folder, named by its start time (UTC), at any depth under the root `trainer.default_root_dir`. The runs of
one name, by default that of their configuration, are in one folder:

    runs/digits_linear/2026-11-21_09-40-12/
        config.yaml         everything that was set
        checkpoints/        last.ckpt, previous.ckpt (the last but one), best.ckpt, step_00001000.ckpt, … (kept ones):
                            files, or folders that several processes have written
        tensorboard/  csv/  samples/  generated/  predictions/
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path

from lit_effattn.checkpoints.plain_yaml import MAX_BYTES
from lit_effattn.checkpoints.shipped import PREFIX, is_model, model_name, model_path

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
"""The newest checkpoint of a run, and the one before it, from which a run resumes if the newest is damaged."""

LOCK = "fit.lock"  # the file that a `fit` locks in the folder of its run
COMMON = "common.pt"  # in a checkpoint that is a folder, the file with the content that all processes have in common

_KEPT = re.compile(r"step_(\d+)\.ckpt")
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")


def new_run(root: Path, everything: Path | None = None) -> Path:
    """Create the folder of a new run under `root`, the folder of one configuration's runs. It never exists before.

    By its name it is the newest run in `everything`, the folder of all runs, even if the clock was set back: `last` is
    the newest. If `root` is outside of that, it is the newest in `root`.
    """
    if everything is None or not root.resolve().is_relative_to(everything.resolve()):
        everything = root
    runs = [*root.glob("*"), *run_folders(everything)]
    newest, number = max((_age(run) for run in runs if _RUN.fullmatch(run.name)), default=("", 0))
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d_%H-%M-%S")
    return new_folder(root, now) if now > newest else new_folder(root, newest, number + 1)


def check_contained(run: Path) -> Path:
    """Return the folder of a run, which may come from somebody else, after checking that it contains all its files.

    A link that leads out of it would let a command write to, or show, any file of the user's. A FIFO would wait.

    Raises:
        ValueError: If there is such a link, a FIFO, a socket or a device. The message names it.
    """
    root, folders = run.resolve(), [run]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                elif entry.is_symlink() and not Path(entry).resolve().is_relative_to(root):
                    target = Path(entry).readlink()
                    raise ValueError(
                        f"{short(Path(entry))} is a link to {target}, outside of the run: delete the link, or link the "
                        "folder of the run itself"
                    )
                elif not entry.is_symlink() and not entry.is_file():
                    raise ValueError(f"{short(Path(entry))} is not a file: delete it from the folder of the run")
    return run


def small_text(path: Path) -> str:
    """Return the text of a file that a run has beside its checkpoints.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is not a file, is not UTF-8, or has more than `MAX_BYTES`.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return content.decode("utf-8")


def new_folder(parent: Path, name: str, number: int = 0) -> Path:
    """Create `parent/name`, or `name_1`, `name_2`, … if that exists. Two processes never get the same folder.

    `number` is the first to try; 0: the name alone.
    """
    for attempt in count(number):
        folder = parent / (f"{name}_{attempt}" if attempt else name)
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def named_or_new(named: Path | None, parent: Path, name: str) -> Path:
    """Create the folder `named`, which may exist; None: a new folder, see `new_folder`."""
    if named is None:
        return new_folder(parent, name)
    named.mkdir(parents=True, exist_ok=True)
    return named


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a file, or the folder of a checkpoint."""
    return path.is_file() or (path / COMMON).is_file()


def run_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of runs under `root`, each once, also behind links to folders."""
    seen = set()
    folders, links = [root], list[Path]()  # links last: a run is found by its own name first
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        with suppress(OSError):
            status = folder.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                inside = [Path(entry) for entry in os.scandir(folder) if entry.is_dir() and entry.name != "checkpoints"]
                folders += [path for path in inside if not path.is_symlink()]
                links += [path for path in inside if path.is_symlink()]
                if _RUN.fullmatch(folder.name):
                    yield folder


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that `checkpoint` belongs to; None if it is outside all runs."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and _RUN.fullmatch(folder.parent.name) else None


def kept_name(step: int) -> str:
    """Return the file name of a kept checkpoint of a step."""
    return f"step_{step:08d}.ckpt"


def kept_checkpoints(folder: Path, *unfinished: Path) -> list[Path]:
    """Return the kept checkpoints in `folder` and those in `unfinished`, ordered by their steps."""
    paths = {*folder.glob("step_*.ckpt"), *unfinished}
    steps = {path: int(match[1]) for path in paths if (match := _KEPT.fullmatch(path.name))}
    return sorted(steps, key=steps.__getitem__)


def last_kept(checkpoint: Path, n: int) -> list[Path]:
    """Return the last `n` checkpoints that the run of `checkpoint` has kept, oldest first.

    If `checkpoint` is a kept one, it is the last.

    Raises:
        ValueError: If `n` is not positive, or more than the number of kept checkpoints.
    """
    if n < 1:
        raise ValueError(f"average={n} is not positive; 5 and 20 are usual")
    folder = checkpoint.resolve().parent
    kept = kept_checkpoints(folder)
    if checkpoint.resolve() in kept:
        kept = kept[: kept.index(checkpoint.resolve()) + 1]
    if len(kept) < n:
        last = f", the last {kept[-1].name}; average {len(kept)} or fewer" if kept else ""
        raise ValueError(
            f"average={n}: there are {len(kept)} kept checkpoints in {short(folder)}{last}; "
            f"training keeps {n} with --checkpoint.keep {n}, one an epoch unless --checkpoint.keep_every_n_train_steps "
            "is given"
        )
    return kept[-n:]


def find_checkpoint(name: str, root: Path, *, option: str = "--ckpt_path") -> Path:
    """Return the checkpoint that `name` names: a path, `last` or `best`, or `model:NAME`, a shipped model.

    `last` and `best` are those of the newest run under `root`; if it has none, of the newest run in the same folder
    that has one. Runs of another configuration, which are in another folder, are not used. `last` is `previous.ckpt` in
    a run without `last.ckpt`. The path of a run's folder means its `last`. Messages name the `option`.

    Raises:
        FileNotFoundError: If there is none. The message names the folder that was searched, or the shipped models.
    """
    if is_model(name):
        return model_path(name, option)
    if name not in ("last", "best"):
        for path in (Path(name), *(Path(name, "checkpoints", file) for file in (LAST, PREVIOUS))):
            if is_checkpoint(path):
                return path.resolve()
        raise FileNotFoundError(
            f"{option} {name}: there is no such file, nor a run's folder with a checkpoint (and it is neither "
            "`last`, `best` nor `model:NAME`)"
        )
    files = (LAST, PREVIOUS) if name == "last" else (f"{name}.ckpt",)
    paths = [path for run in run_folders(root) for path in run.glob("checkpoints/*.ckpt")]
    checkpoints = [path for path in paths if run_of(path) and is_checkpoint(path)]
    newest = max(checkpoints, key=_age_of_run).parent if checkpoints else root
    folder = newest.parent.parent if checkpoints else root
    named = [path for file in files for path in checkpoints if path.name == file and path.parents[2] == folder]
    if not named:
        if name == "best" and is_checkpoint(newest / LAST):
            raise FileNotFoundError(
                f"{option} best: {short(newest)} has no best.ckpt, which the first validation saves; give {option} "
                "last, or train on until --trainer.val_check_interval or --trainer.check_val_every_n_epoch has passed"
            )
        raise FileNotFoundError(
            f"{option} {name}: no run under {folder.resolve()} {'(the newest run is there) ' * bool(checkpoints)}has a "
            f"{name}.ckpt; train one first, name another folder with --trainer.default_root_dir, or give the "
            "checkpoint's path"
        )
    return max(named, key=_age_of_run).resolve()  # the first of equals


def _age(run: Path) -> tuple[str, int]:
    """Return the time in a run's name, and its number among those of that time."""
    return run.name[:19], int(run.name[20:] or 0)


def _age_of_run(checkpoint: Path) -> tuple[str, int]:
    return _age(checkpoint.parent.parent)


def output_folder(checkpoint: Path, root: Path) -> Path | None:
    """Return the folder for what commands make of a checkpoint: its run; for a shipped one, `model_NAME` under `root`.

    None if the checkpoint is another file outside all runs.
    """
    name = model_name(checkpoint)
    return run_of(checkpoint) if name is None else root / f"model_{name}"


def discard_if_empty(run: Path) -> None:
    """Delete the folder of a run that has no files except the lock's, and parent folders that are then empty."""
    if run.is_dir() and not any(path.is_file() and path.name != LOCK for path in run.rglob("*")):
        discard(run)


def discard(run: Path) -> None:
    """Delete the folder of a run, and parent folders that are then empty."""
    run = run.resolve()  # the parents of a relative path end in ".", which can't be deleted
    shutil.rmtree(run)
    for folder in run.parents:
        if folder == Path.cwd() or any(folder.iterdir()):
            return
        folder.rmdir()


def short(path: str | Path) -> str:
    """Return `path` relative to the current folder if it is inside it, else unchanged; a shipped model's name."""
    path = Path(path)
    if (name := model_name(path)) is not None:
        return f"{PREFIX}{name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
