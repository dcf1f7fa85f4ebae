"""`lit-effattn sweep`: train several kinds of attention on the same data, each at its best learning rate."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lit_effattn.analysis.records import read_run
from lit_effattn.analysis.sweep_tables import Cell, Outcome, best_rate, by_kind, by_rate, points
from lit_effattn.analysis.tables import comma_separated, markdown, show
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import find_checkpoint, short
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.drawing import plots
from lit_effattn.settings.arguments import Arguments, File, Settings
from lit_effattn.settings.kinds import attention_kinds, own_kind
from lit_effattn.settings.own_classes import add_trust
from lit_effattn.settings.run_names import ROOT

FACTORS = (1 / 3, 1, 3)
"""The default rates are the configuration's times these."""

RECORD = "sweep.json"
_FIXED = ("seed_everything", "ckpt_path", "name", "trainer.default_root_dir")
"""Flags of `fit` that the sweep gives itself."""
_BETWEEN = r",(?![^\[]*\])"
"""Between two kinds: a comma that is not within brackets, as in linear,infinite:widths=[0.03,0.1]."""
_RATE = "model.optimizer.lr"
_QUIET = ("--trainer.enable_progress_bar", "false")
_INTERRUPTED = (130, 143)

Child = Callable[[list[str], Path, "str | None"], "tuple[int, str]"]
"""Runs a command, adds its output to a file, on a device; returns its exit code and what it said last."""


def sweep(args: list[str]) -> None:
    """Run a sweep, or go on with one that was interrupted, and write its tables and its plot.

    Args:
        args: The arguments of the command; those that it does not know are flags of `fit`.

    Raises:
        ValueError: an argument is invalid, or the folder has a sweep with other settings.
    """
    given, flags = parser().parse_known_args(args)
    given.trust += _own_kinds(given)
    if given.seeds < 1:
        raise ValueError(f"--seeds {given.seeds} must be at least 1")
    configs = [arg for name in given.config for arg in ("--config", name)]
    said = Arguments(["fit", *configs, *flags])
    _check_flags(said.flags)
    wanted = re.split(_BETWEEN, given.kinds)
    kinds = {_short(kind): _flags_of(kind) for kind in wanted}
    if len(kinds) < len(wanted):
        raise ValueError(f"--kinds {given.kinds} names a kind twice; name each once")
    rates = _rates(given.lr, said.files)
    folder = Path(given.output or Path(ROOT, f"sweep_{Path(said.files[-1].path).stem}"))
    runner = Sweep(folder, [*configs, *flags], kinds, _devices(given.devices), trust=given.trust)
    print(f"{len(kinds)} kinds, {len(rates)} rates with seed 0, then seeds 0 … {given.seeds - 1} at the best rate")
    with _terminable():
        runner.run([Cell(kind, rate, 0) for kind in kinds for rate in rates])
        chosen = {kind: rate for kind in kinds if (rate := best_rate(kind, runner.outcomes)) is not None}
        finals = [Cell(kind, rate, seed) for seed in range(given.seeds) for kind, rate in chosen.items()]
        runner.run(finals, test=True)
    report(folder, list(kinds), rates, chosen, runner.outcomes)


def report(
    folder: Path, kinds: Sequence[str], rates: Sequence[float], chosen: dict[str, float], outcomes: dict[Cell, Outcome]
) -> None:
    """Print the table of the kinds, and write it, that of the rates and the plot to `folder`."""
    table, tried = by_kind(kinds, chosen, outcomes), by_rate(kinds, rates, outcomes)
    show(table)
    (folder / "table.md").write_text(f"{markdown(table)}\n{markdown(tried)}", encoding="utf-8")
    (folder / "table.csv").write_text(comma_separated(table), encoding="utf-8")
    counts = {
        kind: record.parameters for kind, rate in chosen.items() if (record := outcomes[Cell(kind, rate, 0)].record)
    }
    if len(set(counts.values())) > 1:
        print("parameters differ: " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items() if count))
    print(f"tables: {short(folder / 'table.md')}, {short(folder / 'table.csv')}")
    metric, found = points(kinds, chosen, outcomes)
    if found and plots.is_available():
        path = plots.scatter(found, "bytes of state", metric, folder / "by_state.png")
        print(f"plot: {short(path)}")
    elif found:
        print("no plot: it needs matplotlib, pip install 'lit-effattn[plots]'")


class Sweep:
    """Runs cells as child processes, and records those that are finished.

    Args:
        folder: Where the runs are, and the record.
        flags: Arguments of `fit` for all of them.
        kinds: Arguments of `fit` for each kind.
        devices: A device number for each child process that runs at the same time; None: the default device.
        child: Runs a command.
        trust: What the user trusts by name. It is no setting: a sweep goes on with other names.

    Raises:
        ValueError: the record in `folder` is of a sweep with other flags.
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
        self._trusted = trust
        self._stopping = threading.Event()
        self._done = self._read_record()

    def run(self, cells: Sequence[Cell], *, test: bool = False) -> None:
        """Train, and with `test` also test, all of `cells` that are not finished."""
        with ThreadPoolExecutor(self._n_devices) as pool:
            futures = [pool.submit(self._run_one, cell, test, f"[{i}/{len(cells)}]") for i, cell in enumerate(cells, 1)]
            try:
                for cell, future in zip(cells, futures, strict=True):
                    self.outcomes[cell] = future.result()
            except BaseException:
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                _terminate_children()
                raise

    def _run_one(self, cell: Cell, test: bool, where: str) -> Outcome:
        if cell in self.outcomes and self.outcomes[cell].record is None:
            return self.outcomes[cell]
        device = self._devices.get()
        try:
            began = time.perf_counter()
            reason = self._fit(cell, device)
            if reason is None and test:
                reason = self._test(cell, device)
            outcome = self._outcome(cell, reason)
        finally:
            self._devices.put(device)
        print(printable(f"{where} {cell}: {outcome.said}, {time.perf_counter() - began:.0f} s"), flush=True)
        return outcome

    def _outcome(self, cell: Cell, reason: str | None) -> Outcome:
        run = self._newest(cell)
        if reason is not None or run is None:
            return Outcome(None, reason or "it wrote no checkpoint")
        record = read_run(run, trust=self._trusted)
        return Outcome(None, record.remark) if record.remark else Outcome(record, None)

    def _fit(self, cell: Cell, device: str | None) -> str | None:
        """Train, or go on training. Return why it was refused."""
        if "fit" in self._done.get(str(cell), ()):
            return None
        rate = [f"--{_RATE}", repr(cell.rate)]
        args = ["fit", *self.flags, *self.kinds[cell.kind], *rate, "--seed_everything", str(cell.seed)]
        args += ["--trainer.default_root_dir", str(self.folder / str(cell)), *self._trust_flags(), *_QUIET]
        run = self._newest(cell)
        return self._call(cell, "fit", [*args, *([] if run is None else ["--ckpt_path", str(run)])], device)

    def _test(self, cell: Cell, device: str | None) -> str | None:
        """Test the best checkpoint. Return why it was refused."""
        if "test" in self._done.get(str(cell), ()):
            return None
        try:
            best = find_checkpoint("best", self.folder / str(cell))
        except FileNotFoundError:
            return "it has no best.ckpt to test: the validation metric was never finite"
        return self._call(cell, "test", ["test", "--ckpt_path", str(best), *self._trust_flags(), *_QUIET], device)

    def _trust_flags(self) -> list[str]:
        return [arg for name in self._trusted for arg in ("--trust", name)]

    def _call(self, cell: Cell, stage: str, args: list[str], device: str | None) -> str | None:
        if self._stopping.is_set():
            raise KeyboardInterrupt
        (self.folder / str(cell)).mkdir(parents=True, exist_ok=True)
        code, said = self._child(args, self.folder / str(cell) / "output.txt", device)
        if code in _INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            return said or f"exit code {code}"
        self._done.setdefault(str(cell), []).append(stage)
        self._write_record()
        return None

    def _newest(self, cell: Cell) -> Path | None:
        """Return the folder of the cell's newest run that has a checkpoint."""
        try:
            return find_checkpoint("last", self.folder / str(cell)).parent.parent
        except FileNotFoundError:
            return None

    def _read_record(self) -> dict[str, list[str]]:
        path = self.folder / RECORD
        if not path.is_file():
            return {}
        record = _read_record(path)
        if _without_trust(record["flags"]) != self.flags:
            raise ValueError(
                f"{path} is of a sweep with {' '.join(record['flags'])}; give these to go on, or another --output"
            )
        done: dict[str, list[str]] = record["done"]
        return done

    def _write_record(self) -> None:
        part = self.folder / f".{RECORD}.part"
        part.write_text(json.dumps({"flags": self.flags, "done": self._done}, indent=1), encoding="utf-8")
        part.replace(self.folder / RECORD)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no record of a sweep: {error}; give another --output") from error
    flags, done = (record.get("flags"), record.get("done")) if isinstance(record, dict) else (None, None)
    lists = [flags, *done.values()] if isinstance(done, dict) else [None]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise ValueError(f"{path} is no record of a sweep, which has flags and what is done; give another --output")
    return {"flags": flags, "done": done}


_children: set[subprocess.Popen[bytes]] = set()


def run_child(args: list[str], log: Path, device: str | None) -> tuple[int, str]:
    """Run `lit-effattn` with `args` as a child process.

    Args:
        args: The command and its arguments.
        log: The file to which its output is added.
        device: Its CUDA device; None: it chooses.

    Returns:
        Its exit code, negative for the signal that killed it, and its error message.
    """
    environment = {**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}
    with log.open("ab") as output:
        begin = output.tell()
        command = [sys.executable, "-m", "lit_effattn.cli", *args]
        child = subprocess.Popen(  # in a session of its own: Ctrl-C reaches this process alone, which stops the child
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        _children.add(child)
        try:
            code = child.wait()
        finally:
            _children.discard(child)
    said = log.read_bytes()[begin:].decode(errors="replace")
    return code, f"killed by signal {-code}" if code < 0 else _error_in(said)


def _error_in(said: str) -> str:
    """Return the error message in the output of the command, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("lit-effattn: error: ")]
    return (errors or lines or [""])[-1]


def _terminate_children() -> None:
    """Stop the child processes, which save a checkpoint."""
    for child in list(_children):
        child.terminate()
    for child in list(_children):
        child.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat the signal SIGTERM as Ctrl-C, so that child processes do not go on alone."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        "lit-effattn sweep",
        description="Train several kinds of attention on the same data for the same number of steps. Each is trained "
        "with seed 0 at every learning rate; the rate with the lowest value of the task's validation metric is then "
        "used for all seeds, whose best checkpoints are tested. A sweep that was stopped goes on when the command is "
        "given again. Other flags are those of `lit-effattn fit`.",
        allow_abbrev=False,
    )
    made.add_argument("-c", "--config", action="append", required=True, help="A shipped configuration or a file.")
    made.add_argument(
        "--kinds",
        required=True,
        help="Kinds of attention with commas between: short names (linear), class names, class paths of your own "
        "(my_module.MyAttention), which are then trusted; lstm replaces the whole backbone. Options follow colons: "
        "transformerxl:mem_len=64:dropout=0.1.",
    )
    made.add_argument("--seeds", type=int, default=3, help="Number of seeds at the best rate. Default: 3.")
    made.add_argument("--lr", help="Rates with commas between. Default: 1/3, 1 and 3 times the configuration's.")
    made.add_argument("--devices", help="CUDA devices with commas between: a run on each. Default: one run at a time.")
    made.add_argument("--output", metavar="FOLDER", help="Default: runs/sweep_CONFIG.")
    add_trust(made)
    return made


def _own_kinds(given: argparse.Namespace) -> list[str]:
    """Return the class paths that `--kinds` names and `--trust` does not.

    Raises:
        ValueError: one can't be imported, or is no kind of attention.
    """
    paths = [path for kind in re.split(_BETWEEN, given.kinds) if "." in (path := kind.partition(":")[0])]
    for path in paths:
        try:
            own_kind(path)
        except ValueError as error:
            raise ValueError(f"--kinds {error}") from error
    return [path for path in paths if path not in given.trust]


def _without_trust(flags: Sequence[str]) -> list[str]:
    """Return flags without `--trust`, which older sweeps have recorded."""
    return [flag for before, flag in pairwise(["", *flags]) if "--trust" not in (before, flag)]


def _check_flags(flags: Settings) -> None:
    for path in _FIXED:
        if flags.given(path):
            raise ValueError(f"--{path} is set by the sweep for each run; leave it out")
    if flags.given(_RATE):
        raise ValueError(f"--{_RATE} is set by the sweep for each run; give --lr RATE[,RATE …]")


def _short(given: str) -> str:
    """Return the name of a kind, with its options, for tables and folders.

    Raises:
        ValueError: no kind or several have this name, or an option has no value.
    """
    kind, *options = given.split(":")
    for option in options:
        if not re.fullmatch(r"\w+=.+", option):
            raise ValueError(f"--kinds {given}: {option!r} is no option; give {kind}:NAME=VALUE")
    return ":".join([_name(kind), *options])


def _name(kind: str) -> str:
    if "." in kind:
        return kind.rpartition(".")[2]
    known = [*attention_kinds(), "LSTM"]
    wanted = kind.lower().replace("_", "").replace("-", "")
    exact = [name for name in known if wanted in (name.lower(), name.removesuffix("Attention").lower())]
    found = exact or [name for name in known if wanted and wanted in name.lower()]
    if len(found) != 1:
        raise ValueError(f"--kinds {kind}: give one of {', '.join(known)}, or the class path of your own")
    return found[0]


def _flags_of(given: str) -> list[str]:
    """Return the arguments of `fit` for a kind and its options."""
    kind, *options = given.split(":")
    name = _name(kind)
    flag = "--model.backbone" if name == "LSTM" else "--model.backbone.attention"
    flags = [flag, kind if "." in kind else name]
    for option in options:
        key, _, value = option.partition("=")
        flags += [f"{flag}.{key}", value]
    return flags


def _rates(text: str | None, files: Sequence[File]) -> list[float]:
    """Return the learning rates that were given, or those around the last one in the configurations."""
    if text is None:
        found = [file.value(_RATE) for file in files]
        rate = next((rate for rate in reversed(found) if isinstance(rate, (int, float))), None)
        if rate is None:
            raise ValueError(f"--config {files[-1].path} has no model.optimizer.lr; give the rates with --lr")
        return [float(f"{factor * rate:.2g}") for factor in FACTORS]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--lr {text}: give numbers with commas between, as 3e-4,1e-3") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--lr {text}: rates must be positive")
    return list(dict.fromkeys(rates))


def _devices(text: str | None) -> list[str | None]:
    if text is None:
        return [None]
    devices: list[str | None] = [*text.split(",")]
    if not all(device and device.isdecimal() for device in devices) or len(set(devices)) < len(devices):
        raise ValueError(f"--devices {text}: give different numbers with commas between, as 0,1")
    return devices
