"""`lit-effattn sweep`: train several kinds of attention on the same data, each at its best learning rate."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import torch

from lit_effattn.analysis.records import read_run
from lit_effattn.analysis.sweep_tables import Cell, Outcome, best_rate, by_kind, by_rate, points
from lit_effattn.analysis.tables import comma_separated, markdown, show
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import check_contained, find_checkpoint, short, small_text
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.drawing import plots
from lit_effattn.hparams import parameters
from lit_effattn.nn.lstm import LSTM
from lit_effattn.settings import parsers
from lit_effattn.settings.arguments import Arguments, File
from lit_effattn.settings.kinds import attention_kinds, full_names, own_kind
from lit_effattn.settings.run_names import ROOT
from lit_effattn.stopping import SIGNALS, Stopped

FACTORS = (1 / 3, 1, 3)
"""The default rates are the configuration's times these."""

RECORD = "sweep.json"
_FIXED = ("seed_everything", "ckpt_path", "name", "trainer.default_root_dir")
"""Flags of `fit` that the sweep sets."""
_BETWEEN = r",(?![^\[]*\])"
"""Separator of kinds: a comma outside brackets, as in linear,infinite:widths=[0.03,0.1]."""
_OPTIMIZER = "model.optimizer"
_RATE = f"{_OPTIMIZER}.lr"
_QUIET = ("--trainer.enable_progress_bar", "false")

Child = Callable[[list[str], Path, "str | None", threading.Event], "tuple[int, str]"]
"""Runs a command on a device and appends its output to a file, unless the sweep is stopping; returns its exit code and
its error message."""


def sweep(args: list[str]) -> None:
    """Run a sweep, or continue an interrupted one, and write its tables and its plot.

    Args:
        args: The arguments of the command. Unknown ones are flags of `fit`.

    Raises:
        ValueError: If an argument is invalid, the folder has a sweep with other settings, or no run succeeds.
    """
    options, flags = parsers.sweep().parse_known_args(args)
    options.trust += _own_kinds(options)
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds} must be at least 1")
    configs = [arg for name in options.config for arg in ("--config", name)]
    arguments = Arguments(["fit", *configs, *flags])
    for path in (*_FIXED, _RATE):
        if arguments.flags.given(path):
            remedy = "give --lr RATE[,RATE …]" if path == _RATE else "leave it out"
            raise ValueError(f"--{path} is set by the sweep for each run; {remedy}")
    if not any(settings.classes(_OPTIMIZER) for settings in (*arguments.files, arguments.flags)):
        raise ValueError(
            f"--config {arguments.files[-1].path} names no class at {_OPTIMIZER}, whose lr the sweep sets; give "
            f"--{_OPTIMIZER} AdamW, or another class"
        )
    names = re.split(_BETWEEN, options.kinds)
    kinds = dict(map(parse_kind, names))
    if len(kinds) < len(names):
        raise ValueError(f"--kinds {options.kinds} names a kind twice; name each once")
    rates = _rates(options.lr, arguments.files)
    folder = Path(options.output or Path(ROOT, f"sweep_{Path(arguments.files[-1].path).stem}"))
    if options.devices is not None and not torch.cuda.is_available():
        raise ValueError(f"--devices {options.devices}: torch finds no CUDA device; leave it out to run on the CPU")
    devices = _devices(options.devices)
    if folder.is_dir():
        check_contained(folder)
    runner = Sweep(folder, [*configs, *flags], kinds, devices, trust=options.trust)
    print(f"{len(kinds)} kinds, {len(rates)} rates with seed 0, then seeds 0 … {options.seeds - 1} at the best rate")
    runner.run([Cell(kind, rate, 0) for kind in kinds for rate in rates])
    chosen = {kind: rate for kind in kinds if (rate := best_rate(kind, runner.outcomes)) is not None}
    finals = [Cell(kind, rate, seed) for seed in range(options.seeds) for kind, rate in chosen.items()]
    runner.run(finals, test=True)
    report(folder, list(kinds), rates, chosen, runner.outcomes)
    if not chosen:
        cell, outcome = next(iter(runner.outcomes.items()))
        raise ValueError(f"--kinds {options.kinds}: no run has succeeded; {cell}: {outcome.failure}")


def report(
    folder: Path, kinds: Sequence[str], rates: Sequence[float], chosen: dict[str, float], outcomes: dict[Cell, Outcome]
) -> None:
    """Print the table of the kinds, and write it, the table of the rates and the plot.

    Args:
        folder: The folder to write to.
        kinds: The names of the kinds.
        rates: All learning rates.
        chosen: The best rate of each kind that has one.
        outcomes: The results of the cells.
    """
    table = by_kind(kinds, chosen, outcomes)
    show(table)
    (folder / "table.md").write_text(
        f"{markdown(table)}\n{markdown(by_rate(kinds, rates, outcomes))}", encoding="utf-8"
    )
    (folder / "table.csv").write_text(comma_separated(table), encoding="utf-8")
    counts = {
        kind: record.parameters for kind, rate in chosen.items() if (record := outcomes[Cell(kind, rate, 0)].record)
    }
    if len(set(counts.values())) > 1:
        print("parameters differ: " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items() if count))
    print(f"tables: {short(folder / 'table.md')}, {short(folder / 'table.csv')}")
    metric, plotted = points(kinds, chosen, outcomes)
    if plotted and plots.is_available():
        path = plots.scatter(plotted, "bytes of state", metric, folder / "by_state.png")
        print(f"plot: {short(path)}")
    elif plotted:
        print("no plot: it needs matplotlib, pip install 'lit-effattn[plots]'")


class Sweep:
    """Runs cells as child processes, and records the finished ones.

    Args:
        folder: The folder of the runs and of the record.
        flags: Arguments of `fit` for all of them.
        kinds: Arguments of `fit` for each kind.
        devices: A device number for each child process that runs at the same time; None is the default device.
        child: Runs a command.
        trust: Class paths that the user trusts. A sweep may continue with others.

    Raises:
        ValueError: If the record in `folder` is of a sweep with other flags, or another class of a kind's name.
    """

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        kinds: dict[str, list[str]],
        devices: Sequence[str | None] = (None,),
        child: Child | None = None,
        trust: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.flags = flags
        self.kinds = kinds
        self.outcomes: dict[Cell, Outcome] = {}
        self._child = child or run_child
        self._devices: SimpleQueue[str | None] = SimpleQueue()
        for device in devices:
            self._devices.put(device)
        self._n_devices = len(devices)
        self._trust = trust
        self._common = [*(arg for name in trust for arg in ("--trust", name)), *_QUIET]
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._done, self._trained = self._read_record()

    def run(self, cells: Sequence[Cell], *, test: bool = False) -> None:
        """Train all unfinished `cells`, and with `test` also test them."""
        with ThreadPoolExecutor(self._n_devices) as pool:
            try:
                places = [f"[{i}/{len(cells)}]" for i in range(1, len(cells) + 1)]
                futures = [pool.submit(self._run_one, cell, test, p) for cell, p in zip(cells, places, strict=True)]
                for cell, future in zip(cells, futures, strict=True):
                    self.outcomes[cell] = future.result()
            except BaseException:
                with _starting:
                    self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                _terminate_children()
                raise

    def _run_one(self, cell: Cell, test: bool, progress: str) -> Outcome:
        if cell in self.outcomes and self.outcomes[cell].record is None:
            return self.outcomes[cell]
        device = self._devices.get()
        try:
            start = time.perf_counter()
            reason = self._fit(cell, device)
            if reason is None and test:
                reason = self._test(cell, device)
            outcome = self._outcome(cell, reason)
        finally:
            self._devices.put(device)
        seconds = time.perf_counter() - start
        print(printable(f"{progress} {cell}: {outcome.summary}, {seconds:.0f} s"), flush=True)
        return outcome

    def _outcome(self, cell: Cell, reason: str | None) -> Outcome:
        run = self._newest(cell)
        if reason is not None or run is None:
            return Outcome(None, reason or "its checkpoints were deleted")
        record = read_run(run, trust=self._trust)
        return Outcome(None, record.remark) if record.remark else Outcome(record, None)

    def _fit(self, cell: Cell, device: str | None) -> str | None:
        """Train, or resume training. Return the reason for a failure."""
        args = ["fit", *self.flags, *self.kinds[cell.kind], f"--{_RATE}", repr(cell.rate)]
        args += ["--seed_everything", str(cell.seed), "--trainer.default_root_dir", str(self.folder / str(cell))]
        run = self._newest(cell)
        return self._call(cell, [*args, *([] if run is None else ["--ckpt_path", str(run)])], device)

    def _test(self, cell: Cell, device: str | None) -> str | None:
        """Test the best checkpoint. Return the reason for a failure."""
        if "test" in self._done.get(str(cell), ()):  # its checkpoint may have been deleted since
            return None
        try:
            best = find_checkpoint("best", self.folder / str(cell))
        except FileNotFoundError:
            return "it has no best.ckpt to test: the validation metric was never finite"
        return self._call(cell, ["test", "--ckpt_path", str(best)], device)

    def _call(self, cell: Cell, args: list[str], device: str | None) -> str | None:
        """Run the command `args[0]` unless it is done. Return the reason for a failure."""
        if args[0] in self._done.get(str(cell), ()):
            return None
        (self.folder / str(cell)).mkdir(parents=True, exist_ok=True)
        log = self.folder / str(cell) / "output.txt"
        code, message = self._child([*args, *self._common], log, device, self._stopping)
        if (number := code - 128 if code > 128 else -code) in SIGNALS:  # -15: before it handled signals
            raise Stopped(number)
        if code:
            return message or f"exit code {code}"
        if self._newest(cell) is None:
            return "it wrote no checkpoint"
        with self._lock, whole(self.folder / RECORD) as part:  # a thread for each device
            self._done.setdefault(str(cell), []).append(args[0])
            self._trained[cell.kind] = self.kinds[cell.kind]
            record = {"flags": self.flags, "kinds": self._trained, "done": self._done}
            part.write_text(json.dumps(record, indent=1), encoding="utf-8")
        return None

    def _newest(self, cell: Cell) -> Path | None:
        """Return the folder of the cell's newest run that has a checkpoint."""
        try:
            return find_checkpoint("last", self.folder / str(cell)).parent.parent
        except FileNotFoundError:
            return None

    def _read_record(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        path = self.folder / RECORD
        if not path.is_file():
            return {}, {}
        flags, done, trained = read_record(path)
        # Older sweeps recorded --trust.
        if [flag for before, flag in pairwise(["", *flags]) if "--trust" not in (before, flag)] != self.flags:
            raise ValueError(
                f"{path} is of a sweep with {' '.join(flags)}; give these flags to continue, or another --output"
            )
        for kind, own in trained.items():
            if self.kinds.get(kind, own) != own:
                raise ValueError(
                    f"{path} is of a sweep with {' '.join(own)}, not {' '.join(self.kinds[kind])}; give this class in "
                    "--kinds to continue, or another --output"
                )
        return done, trained


def read_record(path: Path) -> tuple[list[str], dict[str, list[str]], dict[str, list[str]]]:
    """Return the flags of a sweep, the finished commands of each cell, and the flags of each kind with such a cell.

    Raises:
        ValueError: If the file is not the record of a sweep.
    """
    try:
        record = parse_json(small_text(path))
        flags, done, kinds = record["flags"], record["done"], record.get("kinds", {})  # older ones have no kinds
        lists = (flags, *done.values(), *kinds.values())
        if not all(isinstance(x, list) and all(isinstance(text, str) for text in x) for x in lists):
            raise TypeError("it must hold lists of texts")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} is not the record of a sweep: {error}; give another --output") from error
    return flags, done, kinds


COMMAND = Path(parsers.__file__).parents[1] / "cli" / "__main__.py"
_children: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()
"""Held while a child starts, and when a sweep begins to stop: it then starts no child that it does not stop."""


def run_child(args: list[str], log: Path, device: str | None, stopping: threading.Event) -> tuple[int, str]:
    """Run `lit-effattn` with `args` as a child process.

    Args:
        args: The command and its arguments.
        log: The file to which its output is appended.
        device: Its CUDA device, or None for the default.
        stopping: Set by a sweep that stops.

    Returns:
        Its exit code, negative for the signal that killed it, and its error message.

    Raises:
        CancelledError: If the sweep is stopping.
    """
    environment = {**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}
    with log.open("ab") as output:
        start = output.tell()
        command = [sys.executable, str(COMMAND), *args]  # with -m, modules of the current folder would come first
        with _starting:
            if stopping.is_set():
                raise CancelledError
            child = subprocess.Popen(  # in its own session: Ctrl-C reaches only this process, which stops the child
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            _children.add(child)
        try:
            code = child.wait()
        finally:
            _children.discard(child)
    if code < 0:
        return code, f"killed by signal {-code}"
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("lit-effattn: error: ")]
    return code, (errors or lines or [""])[-1]


def _terminate_children() -> None:
    """Stop the child processes, which save a checkpoint."""
    for child in list(_children):
        child.terminate()
    for child in list(_children):
        child.wait()


def _own_kinds(options: argparse.Namespace) -> list[str]:
    """Return the class paths in `--kinds` that are not in `--trust`.

    Raises:
        ValueError: If one can't be imported, or is not a kind of attention.
    """
    paths = [path for kind in re.split(_BETWEEN, options.kinds) if "." in (path := kind.partition(":")[0])]
    for path in paths:
        try:
            own_kind(path)
        except ValueError as error:
            raise ValueError(f"--kinds {error}") from error
    return [path for path in paths if path not in options.trust]


def parse_kind(text: str) -> tuple[str, list[str]]:
    """Return the name of a kind with its options, for tables and folders, and its arguments of `fit`.

    Raises:
        ValueError: If no kind or several have this name, or an option has no value or is none of the kind's.

    Examples:
        >>> parse_kind("linear:chunk_size=64")[0]
        'LinearAttention:chunk_size=64'
    """
    kind, *options = text.split(":")
    name = _class_name(kind)
    flag = "--model.backbone" if name == "LSTM" else "--model.backbone.attention"
    flags = [flag, kind if "." in kind else name]
    kinds: dict[str, type] = {**attention_kinds(), "LSTM": LSTM}
    known = {} if "." in kind else parameters(kinds[name])
    for option in options:
        if not re.fullmatch(r"\w+=.+", option):
            raise ValueError(f"--kinds {text}: {option!r} is not an option; give {kind}:NAME=VALUE")
        key, _, value = option.partition("=")
        if known and key not in known:
            raise ValueError(f"--kinds {text}: {name} has no option {key}; there are {', '.join(known)}")
        flags += [f"{flag}.{key}", value]
    return ":".join([name, *options]), flags


def _class_name(kind: str) -> str:
    if "." in kind:
        return kind.rpartition(".")[2]
    known = [*attention_kinds(), "LSTM"]
    names = full_names(kind, known)
    if len(names) != 1:
        raise ValueError(f"--kinds {kind}: give one of {', '.join(known)}, or the path of your own class")
    return names[0]


def _rates(text: str | None, files: Sequence[File]) -> list[float]:
    """Return the given learning rates, or those around the last one in the configurations."""
    if text is None:
        configured = [(file.path, rate) for file in files if isinstance(rate := file.value(_RATE), (int, float))]
        if not configured:
            raise ValueError(f"--config {files[-1].path} has no model.optimizer.lr; give the rates with --lr")
        path, rate = configured[-1]
        given = f"--config {path}: {_RATE} {rate}"
        rates = [float(rate if factor == 1 else f"{factor * rate:.2g}") for factor in FACTORS]
    else:
        given = f"--lr {text}"
        try:
            rates = [float(number) for number in text.split(",")]
        except ValueError:
            raise ValueError(f"{given}: give numbers with commas between, as 3e-4,1e-3") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"{given}: rates must be positive")
    return list(dict.fromkeys(rates))


def _devices(text: str | None) -> list[str | None]:
    """Return the devices by their names for CUDA_VISIBLE_DEVICES. Numbers count those that are visible now."""
    if text is None:
        return [None]
    devices = text.split(",")
    if not all(map(str.isdecimal, devices)) or len(set(devices)) < len(devices):
        raise ValueError(f"--devices {text}: give different numbers with commas between, as 0,1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*devices]
    names = visible.split(",")
    if max(map(int, devices)) >= len(names):
        raise ValueError(f"--devices {text}: CUDA_VISIBLE_DEVICES={visible} has only the devices 0 to {len(names) - 1}")
    return [names[int(device)] for device in devices]
