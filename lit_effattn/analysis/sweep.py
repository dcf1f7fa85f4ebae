"""`lit-effattn sweep`: train several kinds of attention on the same data, each at its best learning rate."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lit_effattn.analysis.records import read_run
from lit_effattn.analysis.sweep_tables import Cell, Outcome, best_rate, by_kind, by_rate
from lit_effattn.analysis.tables import comma_separated, markdown, show
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import check_contained, find_checkpoint, short, small_text
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.hparams import parameters
from lit_effattn.nn.lstm import LSTM
from lit_effattn.settings.arguments import Arguments, File
from lit_effattn.settings.kinds import attention_kinds, full_names, options_of, own_kind
from lit_effattn.settings.tools import ROOT, add_trust, tool_parser
from lit_effattn.stopping import SIGNALS, Stopped

FACTORS = (1 / 3, 1, 3)  # the default rates are the configuration's times these

RECORD = "sweep.json"
COMMAND = Path(__file__).parents[1] / "cli" / "__main__.py"
_FIXED = ("seed_everything", "ckpt_path", "name", "trainer.default_root_dir")  # flags of `fit` that the sweep sets
_BETWEEN = r",(?![^\[]*\])"  # separator of kinds: a comma outside brackets, as in linear,infinite:widths=[0.03,0.1]
_RATE = "model.optimizer.lr"


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "sweep",
        "Train several kinds of attention on the same data for the same number of steps. Each is trained "
        "with seed 0 at every learning rate; the rate with the lowest value of the task's validation metric is then "
        "used for all seeds, whose best checkpoints are tested. An interrupted sweep continues when the command is "
        "repeated. Other flags are those of `lit-effattn fit`.",
    )
    parser.add_argument("-c", "--config", action="append", required=True, help="A shipped configuration or a file.")
    parser.add_argument(
        "--kinds",
        required=True,
        help="Kinds of attention with commas between: short names (linear), class names, class paths of your own "
        "(my_module.MyAttention), which are then trusted; lstm replaces the whole backbone. Options follow colons: "
        "transformerxl:mem_len=64:dropout=0.1.",
    )
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds at the best rate. Default: 3.")
    parser.add_argument("--lr", help="Rates with commas between. Default: 1/3, 1 and 3 times the configuration's.")
    parser.add_argument("--devices", help="CUDA devices with commas between, one a run. Default: one run at a time.")
    parser.add_argument("--output", metavar="FOLDER", help="Default: runs/sweep_CONFIG.")
    add_trust(parser)
    return parser


def sweep(args: list[str]) -> None:
    """Run a sweep, or continue an interrupted one, and write its tables. Unknown arguments are flags of `fit`.

    Raises:
        ValueError: If an argument is invalid, the folder has a sweep with other flags, or no run succeeds.
    """
    options, flags = _parser().parse_known_args(args)
    names = re.split(_BETWEEN, options.kinds)
    own = {path: own_kind(path) for name in names if "." in (path := name.partition(":")[0])}
    trust = [*options.trust, *(path for path in own if path not in options.trust)]
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds} must be at least 1")
    configs = [arg for name in options.config for arg in ("--config", name)]
    arguments = Arguments(["fit", *configs, *flags])
    for path in (*_FIXED, _RATE):
        if arguments.flags.given(path):
            remedy = "give --lr RATE[,RATE …]" if path == _RATE else "leave it out"
            raise ValueError(f"--{path} is set by the sweep for each run; {remedy}")
    for option in arguments.options:
        if not option.key:
            raise ValueError(f"{option.args[0]!r} is not an option; --kinds takes kinds with commas between")
        if option.key == "model.backbone.attention":
            raise ValueError(f"--{option.key} is set by the sweep for each run; name the kind in --kinds")
    kinds = dict(map(parse_kind, names))
    if len(kinds) < len(names):
        raise ValueError(f"--kinds {options.kinds} names a kind twice; name each once")
    rates = _rates(options.lr, arguments.files)
    folder = Path(options.output or Path(ROOT, f"sweep_{Path(arguments.files[-1].path).stem}"))
    devices = _devices(options.devices)
    if folder.is_dir():
        check_contained(folder)
    runner = Sweep(folder, [*configs, *flags], kinds, devices, trust=trust)
    print(f"{len(kinds)} kinds, {len(rates)} rates with seed 0, then seeds 0 … {options.seeds - 1} at the best rate")
    runner.run([Cell(kind, rate, 0) for kind in kinds for rate in rates])
    chosen = {kind: rate for kind in kinds if (rate := best_rate(kind, runner.outcomes)) is not None}
    finals = [Cell(kind, rate, seed) for seed in range(options.seeds) for kind, rate in chosen.items()]
    runner.run(finals, test=True)
    write_tables(folder, list(kinds), rates, chosen, runner.outcomes)
    if not chosen:
        cell, outcome = next(iter(runner.outcomes.items()))
        raise ValueError(f"--kinds {options.kinds}: no run has succeeded; {cell}: {outcome.failure}")


def write_tables(
    folder: Path, kinds: Sequence[str], rates: Sequence[float], chosen: dict[str, float], outcomes: dict[Cell, Outcome]
) -> None:
    """Print the table of the kinds, and write it and the table of the rates into `folder`."""
    table = by_kind(kinds, chosen, outcomes)
    show(table)
    text = f"{markdown(table)}\n{markdown(by_rate(kinds, rates, outcomes))}"
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.csv").write_text(comma_separated(table), encoding="utf-8")
    print(f"tables: {short(folder / 'table.md')}, {short(folder / 'table.csv')}")


class Child(subprocess.Popen[bytes]):
    """A process that runs `lit-effattn` on a CUDA device, None for the default, and appends its output to `log`."""

    def __init__(self, args: list[str], log: Path, device: str | None) -> None:
        environment = {**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}
        command = [sys.executable, str(COMMAND), *args]  # with -m, modules of the current folder would come first
        with log.open("ab") as output:
            self._log, self._begin = log, output.tell()
            super().__init__(  # in its own session: Ctrl-C reaches only this process, which stops it
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def message(self) -> str:
        """Wait for its end, and return its error message, else its last line."""
        if (code := self.wait()) < 0:
            return f"killed by signal {-code}"
        output = self._log.read_bytes()[self._begin :].decode(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("lit-effattn: error: ")]
        return (errors or lines or [""])[-1]


class Sweep:
    """Runs cells as child processes, and records the finished ones.

    Args:
        folder: The folder of the runs and of the record.
        flags: Arguments of `fit` for all of them.
        kinds: Arguments of `fit` for each kind.
        devices: A device for each child process that runs at the same time; None is the default device.
        start: Starts a command on a device, whose output is appended to a file: see `Child`.
        trust: Class paths that the user trusts. A sweep may continue with others.

    Raises:
        ValueError: If the record in `folder` is of a sweep with other flags.
    """

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        kinds: dict[str, list[str]],
        devices: Sequence[str | None] = (None,),
        start: Callable[[list[str], Path, str | None], Child] = Child,
        trust: Sequence[str] = (),
    ) -> None:
        self.folder, self.flags, self.kinds = folder, flags, kinds
        self.outcomes: dict[Cell, Outcome] = {}
        self._start, self._devices, self._trust = start, devices, trust
        self._common = [*(arg for name in trust for arg in ("--trust", name)), "--trainer.enable_progress_bar=false"]
        self._children: list[Child] = []
        recorded, self._done = read_record(folder / RECORD) if (folder / RECORD).is_file() else (flags, {})
        if recorded != flags:
            given = " ".join(recorded)
            raise ValueError(f"{folder / RECORD} is of a sweep with {given}; give these flags, or another --output")

    def run(self, cells: Sequence[Cell], *, test: bool = False) -> None:
        """Train all unfinished `cells`, and with `test` also test them."""
        waiting, ended = list(cells), (f"[{i}/{len(cells)}]" for i in count(1))
        running: dict[str | None, tuple[Iterator[Child], Child]] = {}  # by device
        try:
            while waiting or running:
                for device in self._devices:
                    job, child = running.pop(device, (iter(()), None))
                    if child is None or child.poll() is not None:  # the next command, of this cell or of the next ones
                        while (child := next(job, None)) is None and waiting:
                            job = self._job(waiting.pop(0), device, test, ended)
                    if child is not None:
                        running[device] = job, child
                if all(child.poll() is None for _, child in running.values()):
                    time.sleep(0.1 * bool(running))
        except BaseException:
            for child in self._children:
                child.terminate()
            for child in self._children:
                child.wait()
            raise

    def _job(self, cell: Cell, device: str | None, test: bool, ended: Iterator[str]) -> Iterator[Child]:
        """Run the commands of a cell that are not done: yield each child, and go on when it has ended."""
        known = self.outcomes.get(cell)
        if known is None or known.record is not None:
            reason = None
            for name in ("fit", "test")[: 1 + test]:
                if reason is None and name not in self._done.get(str(cell), ()):  # done: its checkpoint may be deleted
                    reason = yield from self._call(cell, name, device)
            self.outcomes[cell] = self._outcome(cell, reason)
        outcome = self.outcomes[cell]
        found = outcome.record and f"{outcome.record.monitor} {outcome.score:.4g}"
        print(printable(f"{next(ended)} {cell}: {found or f'refused: {outcome.reason}'}"), flush=True)

    def _call(self, cell: Cell, name: str, device: str | None) -> Generator[Child, None, str | None]:
        """Run `fit`, which resumes the newest run, or `test`. Return the reason for a failure."""
        own = self.folder / str(cell)
        if name == "fit":
            run = self._newest(cell)
            args = ["fit", *self.flags, *self.kinds[cell.kind], f"--{_RATE}", repr(cell.rate)]
            args += ["--seed_everything", str(cell.seed), "--trainer.default_root_dir", str(own)]
            args += [] if run is None else ["--ckpt_path", str(run)]
        else:
            try:
                args = ["test", "--ckpt_path", str(find_checkpoint("best", own))]
            except FileNotFoundError:
                return "it has no best.ckpt to test: the validation metric was never finite"
        own.mkdir(parents=True, exist_ok=True)
        child = self._start([*args, *self._common], own / "output.txt", device)
        self._children.append(child)
        yield child
        self._children.remove(child)
        code = child.poll() or 0
        if (number := code - 128 if code > 128 else -code) in SIGNALS:  # -15: before it handled signals
            raise Stopped(number)
        if code:
            return child.message() or f"exit code {code}"
        if self._newest(cell) is None:
            return "it wrote no checkpoint"
        self._done.setdefault(str(cell), []).append(name)
        with whole(self.folder / RECORD) as part:
            part.write_text(json.dumps({"flags": self.flags, "done": self._done}, indent=1), encoding="utf-8")
        return None

    def _outcome(self, cell: Cell, reason: str | None) -> Outcome:
        run = self._newest(cell)
        if reason is not None or run is None:
            return Outcome(None, reason or "its checkpoints were deleted")
        record = read_run(run, trust=self._trust)
        return Outcome(None, record.remark) if record.remark else Outcome(record, None)

    def _newest(self, cell: Cell) -> Path | None:
        """Return the folder of the cell's newest run that has a checkpoint."""
        try:
            return find_checkpoint("last", self.folder / str(cell)).parent.parent
        except FileNotFoundError:
            return None


def read_record(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the flags of a sweep, and the finished commands of each cell.

    Raises:
        ValueError: If the file is not the record of a sweep.
    """
    try:
        record = parse_json(small_text(path))
        flags, done = record["flags"], record["done"]
        if not all(isinstance(x, list) and all(isinstance(text, str) for text in x) for x in (flags, *done.values())):
            raise TypeError("it must hold lists of texts")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} is not the record of a sweep: {error}; give another --output") from error
    return flags, done


def parse_kind(text: str) -> tuple[str, list[str]]:
    """Return the name of a kind with its options, for tables and folders, and its arguments of `fit`.

    Raises:
        ValueError: If no kind or several have this name, or an option has no value or is none of the kind's.

    Examples:
        >>> parse_kind("linear:chunk_size=64")[0]
        'LinearAttention:chunk_size=64'
    """
    kind, *options = text.split(":")
    kinds: dict[str, Any] = {**attention_kinds(), "LSTM": LSTM}
    names = [kind] if "." in kind else full_names(kind, kinds)
    if len(names) != 1:
        raise ValueError(f"--kinds {kind}: give one of {', '.join(kinds)}, or the path of your own class")
    (name,) = names
    flag = "--model.backbone" if name == "LSTM" else "--model.backbone.attention"
    flags = [flag, name]
    known = parameters(LSTM) if name == "LSTM" else options_of(kinds[name]) if name in kinds else {}
    for option in options:
        key, _, value = option.partition("=")
        if not re.fullmatch(r"\w+=.+", option):
            raise ValueError(f"--kinds {text}: {option!r} is not an option; give {kind}:NAME=VALUE")
        if known and key not in known:
            raise ValueError(f"--kinds {text}: {name} has no option {key}; there are {', '.join(known)}")
        flags += [f"{flag}.{key}", value]
    return ":".join([name, *options]), flags


def _rates(text: str | None, files: Sequence[File]) -> list[float]:
    """Return the given learning rates, or those around the last one in the configurations."""
    configured = [rate for file in files for rate in file.values(_RATE) if isinstance(rate, (int, float))]
    if text is None and not configured:
        raise ValueError(f"--config {files[-1].path} has no {_RATE}; give the rates with --lr")
    try:
        # Two digits of a multiple: a third of 0.003 is 0.001, not 0.001 less a rounding error.
        around = [str(configured[-1]) if f == 1 else f"{f * configured[-1]:.2g}" for f in FACTORS if configured]
        rates = [float(number) for number in (around if text is None else text.split(","))]
    except ValueError:
        raise ValueError(f"--lr {text}: give numbers with commas between, as 3e-4,1e-3") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--lr {text or configured[-1]}: rates must be positive")
    return list(dict.fromkeys(rates))


def _devices(text: str | None) -> list[str | None]:
    """Return the devices by their names for CUDA_VISIBLE_DEVICES. Numbers count those that are visible now."""
    if text is None:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    devices = text.split(",")
    if not {*devices} <= {str(i) for i in range(len(names))} or len({*devices}) < len(devices):
        raise ValueError(f"--devices {text}: give different numbers below {len(names)}, the number of CUDA devices")
    return [names[int(device)] for device in devices]
