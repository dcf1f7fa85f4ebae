"""Interrupt training runs and check that each resumed run equals the uninterrupted one bit for bit.

Every trial trains a small model with the `lit-effattn` command, interrupts it one to three times, resumes it with
`--ckpt_path last` and compares the result with that of an uninterrupted run of the same configuration: weights,
optimiser, schedule, random states, carried memory, logged values, the best checkpoint and the files that are left. It
prints a line for each interruption and a table. In the table, "same state" counts the runs whose last.ckpt is equal,
whatever else differs.

Without --cells, runs are killed (SIGKILL to all their processes) at random times and at named moments. With --cells
they are stopped in order, by SIGTERM or by a time limit, in a cover of all pairs of task, limits, moment, processes,
accumulation, validation and schedule. The exit code is 1 if any resumed run differs. With --signals, all commands get
signals: see `tests.faults.signals`.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.faults import signals
from tests.faults.cases import DIMENSIONS, EPOCHS, TRUST, Settings, newest, start, write_data
from tests.faults.comparison import (
    compare_best,
    compare_checkpoints,
    compare_logs,
    read_log,
    remains,
    unreadable,
)
from tests.faults.processes import Run, in_fork
from tests.support.cases import pairwise

EXIT_CODES = {"kill": -9, "term": 143, "stop": 0}
HOOKS = (
    "before a step",
    "after a step",
    "in an accumulation window",
    "after the last batch of an epoch",
    "at the end of an epoch",
    "in a validation",
)
AFTER_STATE = ("log: ", "best.ckpt", "left over: ")
"""How a difference begins that was found after `last.ckpt` was found equal."""
FILES = {
    "while a checkpoint is written": "write",
    "before its part file is renamed": "before_rename",
    "after its part file was renamed": "after_rename",
}
VARIANTS = (
    Settings(every_n_train_steps=2),
    Settings(accumulate=3, validation="within epochs", every_n_train_steps=1),
    Settings(validation="within epochs", schedule="plateau", every_n_train_steps=3),
)
"""Settings of the runs that are killed."""
AFTER_TERM = "while it saves on SIGTERM"
MOMENTS = ("at a random time", *HOOKS, *FILES, AFTER_TERM)


@dataclass(frozen=True)
class Interruption:
    """One interruption of a run.

    Attributes:
        moment: Its name in the table.
        plan: What the callback `Fault` does; None: the run is killed at a random time.
        fraction: The random time, as a fraction of that of the uninterrupted run.
        from_start: The time is counted from the start of the process, else from that of the training.
    """

    moment: str
    plan: dict[str, Any] | None = None
    fraction: float = 0.0
    from_start: bool = False

    @property
    def act(self) -> str:
        return self.plan["act"] if self.plan else "kill"

    def where(self) -> str:
        """Describe the place in the run."""
        if self.plan is None:
            return f"{self.fraction:.0%} of the {'run' if self.from_start else 'training'}"
        place = self.plan.get("term", self.plan)
        if "nth" in place:
            return f"write {place['nth']} of {place['file']}"
        where = ", ".join(f"{key} {place[key]}" for key in ("epoch", "batch") if key in place)
        if place is self.plan:
            return where
        step = next(name for name, moment in FILES.items() if moment == self.plan["moment"])
        return f"SIGTERM {place['moment'].replace('_', ' ')}, {where}; killed {step}"


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        settings: Of the run.
        interruptions: Those that took place, each with the step that the run was resumed from; None: started anew.
        difference: The first difference from the uninterrupted run, or None.
    """

    settings: Settings
    interruptions: list[tuple[Interruption, int | None]] = field(default_factory=list)
    difference: str | None = None

    def lines(self) -> Iterator[str]:
        """Return a line for each interruption."""
        for interruption, step in self.interruptions:
            where = f"{interruption.moment} ({interruption.where()})"
            resumed = "started anew" if step is None else f"from step {step}"
            exact = "exact" if self.difference is None else f"NOT exact: {self.difference}"
            yield f"{self.settings} | {where} | {resumed} | {exact}"
        if not self.interruptions:
            yield f"{self.settings} | not interrupted | {self.difference or 'exact'}"


@dataclass
class Whole:
    """An uninterrupted run: its folder, and the seconds of the process and until its training started."""

    run: Path
    seconds: float
    before: float


class Harness:
    """Runs trials in the current folder."""

    def __init__(self) -> None:
        self._whole: dict[Settings, Whole] = {}
        self._trials = 0

    def whole(self, settings: Settings) -> Whole:
        """Return the uninterrupted run of `settings`, which is trained at the first call."""
        if settings not in self._whole:
            folder = Path(f"whole-{len(self._whole)}")
            run = Run(start(settings, folder), settings.processes, folder, Path("cache"))
            before = run.started()
            code = run.wait()
            if code != 0 or before is None:
                raise RuntimeError(f"{settings}: the uninterrupted run failed\n{run.output.read_text()}")
            batches = int(run.marker.read_text())
            if batches != settings.batches:
                raise RuntimeError(f"{settings}: an epoch has {batches} batches, not {settings.batches}")
            self._whole[settings] = Whole(newest(folder), run.seconds, before)
        return self._whole[settings]

    def trial(self, settings: Settings, interruptions: Iterable[Interruption]) -> Outcome:
        """Interrupt and resume a run of `settings`, then compare."""
        timed = settings.limits == "max_time"
        settings_of_run = replace(settings, limits="max_epochs") if timed else settings
        whole = self.whole(settings_of_run)
        self._trials += 1
        folder, outcome = Path(f"trial-{self._trials}"), Outcome(settings)
        outcome.difference = self._interrupt(settings_of_run, list(interruptions), whole, folder, outcome)
        if outcome.difference is None:
            shutil.rmtree(folder)
        return outcome

    def _interrupt(
        self, settings: Settings, planned: list[Interruption], whole: Whole, folder: Path, outcome: Outcome
    ) -> str | None:
        # A random kill may hit the preparation of the data.
        cache = folder / "cache" if planned[0].plan is None else Path("cache")
        may_add = None
        for interruption in (*planned, None):
            resumed = outcome.interruptions and outcome.interruptions[-1][1] is not None
            args = resume(folder) if resumed else start(settings, folder)
            run = Run(args, settings.processes, folder, cache, interruption.plan if interruption else None)
            if interruption and interruption.plan is None:
                self._kill_at(run, interruption, whole)
            code = run.wait()
            if code is None:
                return f"did not end; see {run.output}"
            if not run.interrupted(code):
                if code:
                    return f"exit code {code} of the {'resumed' if resumed else 'first'} run: {last_line(run)}"
                if interruption and interruption.plan and not outcome.interruptions:
                    return "the moment did not come"
                break
            last = newest(folder) / "checkpoints" / "last.ckpt" if newest(folder) else None
            step = None if last is None else in_fork(step_of, last)
            outcome.interruptions.append((interruption, step))
            if step == -1:
                return "last.ckpt can't be read"
            if code != EXIT_CODES[interruption.act]:
                return f"exit code {code}, not {EXIT_CODES[interruption.act]}: {last_line(run)}"
            if interruption.act == "stop":
                may_add = max(
                    (s for k, v in read_log(newest(folder)).items() if k[:4] == "val/" for s in v), default=None
                )
        ended = newest(folder)
        if ended is None:
            return "there is no last.ckpt"
        return in_fork(compare, whole.run, ended, may_add)

    @staticmethod
    def _kill_at(run: Run, interruption: Interruption, whole: Whole) -> None:
        if interruption.from_start:
            time.sleep(interruption.fraction * whole.seconds)
        elif run.started() is not None:
            time.sleep(interruption.fraction * (whole.seconds - whole.before))
        run.kill()


def compare(whole: Path, resumed: Path, may_add: int | None) -> str | None:
    """Return the first difference of two runs."""
    a, b = (run / "checkpoints" / "last.ckpt" for run in (whole, resumed))
    return (
        unreadable(resumed)
        or compare_checkpoints(a, b)
        or compare_logs(read_log(whole), read_log(resumed), may_add)
        or (compare_best(a.with_name("best.ckpt"), b.with_name("best.ckpt")) if may_add is None else None)
        or remains(resumed)
    )


def resume(folder: Path) -> list[str]:
    """Return the arguments that resume the newest run."""
    return ["fit", "--ckpt_path", "last", "--trainer.default_root_dir", str(folder / "runs"), *TRUST]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, or -1 if it can't be read."""
    try:
        return torch.load(checkpoint, weights_only=True)["global_step"]
    except Exception:
        return -1


def last_line(run: Run) -> str:
    lines = [line for line in run.output.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1].strip()[:200]


# --------------------------------------------------------------------------------------------------------- the trials


def cells() -> Iterator[tuple[Settings, list[Interruption]]]:
    """Orderly stops, in a cover of all pairs of the dimensions; those with one process first."""
    for cell in sorted(pairwise(DIMENSIONS, "processes"), key=lambda cell: cell["processes"]):
        moment = cell.pop("moment")
        settings = Settings(**cell)
        act = "stop" if settings.limits == "max_time" else "term"
        plan = {"act": act, **stop_at(moment, settings)}
        yield settings, [Interruption(f"{'SIGTERM' if act == 'term' else 'time limit'}, {moment}", plan)]


def stop_at(moment: str, settings: Settings) -> dict[str, Any]:
    """Return where to stop. A time limit that expires in a validation stops the run after the next batch."""
    hook = "train_batch_end" if settings.limits == "max_time" else "train_batch_start"
    if moment == "during validation" and settings.limits != "max_time":
        return {"moment": "validation_batch_start", "epoch": 1, "batch": 1}
    epoch, batch = {
        "first step": (0, settings.accumulate - 1),
        "mid-epoch": (1, settings.batches // 2 - 1),
        "last step of an epoch": (1, settings.batches - 1),
        "during validation": {"each epoch": (2, 0), "within epochs": (1, 4)}.get(settings.validation, (1, 3)),
    }[moment]
    return {"moment": hook, "epoch": epoch, "batch": batch}


def kills(rng: random.Random, tasks: tuple[str, ...]) -> Iterator[tuple[Settings, list[Interruption]]]:
    """Yield trials without end: a third of them killed at random times, a quarter with two processes."""
    named = [m for m in MOMENTS if m != MOMENTS[0]]
    for i in count():
        moment = MOMENTS[0] if i % 3 == 2 else named[(i - i // 3) % len(named)]
        settings = rng.choice(VARIANTS[1:2] if "window" in moment else VARIANTS)
        settings = replace(
            settings, task=tasks[(i + i // 12) % len(tasks)], processes=2 if (i + i // 4) % 4 == 3 else 1
        )
        planned = [killed_at(moment, settings, rng)]
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            later = rng.choice((MOMENTS[0], "at the end of an epoch", *FILES))
            planned.append(killed_at(later, settings, rng, later=True))
        yield settings, planned


def killed_at(moment: str, settings: Settings, rng: random.Random, later: bool = False) -> Interruption:
    """Draw the place of a kill; `later`: one that comes if the run was interrupted before."""
    if moment == MOMENTS[0]:
        from_start = settings.processes == 1 and rng.random() < 0.3
        return Interruption(moment, None, rng.uniform(0.0, 0.5 if later else 0.95), from_start)
    if moment in FILES:
        file = "last.ckpt" if later else rng.choice(("last.ckpt", "last.ckpt", "best.ckpt"))
        nth = 1 if later or file == "best.ckpt" else rng.randint(1, EPOCHS)
        return Interruption(moment, {"act": "kill", "moment": FILES[moment], "file": file, "nth": nth})
    if moment == AFTER_TERM:
        hook = rng.choice(("train_batch_start", "train_batch_end", "validation_batch_start"))
        batch = rng.randrange(2 if hook == "validation_batch_start" else settings.batches - 1)
        term = {"moment": hook, "epoch": rng.randrange(EPOCHS), "batch": batch}
        written = {"moment": rng.choice(tuple(FILES.values())), "file": "last.ckpt", "nth": 1}
        return Interruption(moment, {"act": "kill", "term": term, **written})
    n, batches = settings.accumulate, settings.batches
    first = rng.randrange(batches // n if "window" in moment else settings.steps) * n
    plan = {
        "before a step": {"moment": "train_batch_start", "batch": first},
        "after a step": {"moment": "train_batch_end", "batch": min(first + n, batches) - 1},
        "in an accumulation window": {"moment": "train_batch_end", "batch": first},
        "after the last batch of an epoch": {"moment": "train_batch_end", "batch": batches - 1},
        "at the end of an epoch": {"moment": "train_epoch_end"},
        "in a validation": {"moment": "validation_batch_start", "batch": rng.randrange(2)},
    }[moment]
    return Interruption(moment, {"act": "kill", "epoch": EPOCHS - 1 if later else rng.randrange(EPOCHS), **plan})


# --------------------------------------------------------------------------------------------------------- the command


def table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table with a row for each moment."""
    rows: dict[str, list[int]] = {}
    for outcome in outcomes:
        for interruption, step in outcome.interruptions:
            for name in (interruption.moment, "**all**"):
                row = rows.setdefault(name, [0, 0, 0, 0])
                row[0] += 1
                row[1] += outcome.difference is None
                row[2] += (outcome.difference or "log: ").startswith(AFTER_STATE)
                row[3] += step is None
    total = rows.pop("**all**", [0, 0, 0, 0])
    lines = [f"| {name} | {' | '.join(map(str, row))} |" for name, row in [*sorted(rows.items()), ("**all**", total)]]
    return "\n".join(
        ["| moment | interruptions | exact | same state | started anew |", "|---|--:|--:|--:|--:|", *lines]
    )


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, metavar="N", help="number of kills (default: 100, with --cells 0)")
    parser.add_argument("--cells", action="store_true", help="the orderly stops; with --kills N, both")
    parser.add_argument("--signals", action="store_true", help="send signals to all commands instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills (default: 0)")
    parser.add_argument("--only", choices=DIMENSIONS["task"], help="one task")
    parser.add_argument("--sharded", action="store_true", help="divide all models between two processes")
    parser.add_argument("--asynchronous", action="store_true", help="all runs train while a checkpoint is written")
    return parser.parse_args(args)


def trials(options: argparse.Namespace, done: list[Outcome]) -> Iterator[tuple[Settings, list[Interruption]]]:
    """Yield the trials that the options ask for. A later kill of a run may not come, so those in `done` are counted."""
    tasks = (options.only,) if options.only else DIMENSIONS["task"]
    processes = (2,) if options.sharded else DIMENSIONS["processes"]
    n_kills = (0 if options.cells else 100) if options.kills is None else options.kills
    if options.cells:
        yield from (trial for trial in cells() if trial[0].task in tasks and trial[0].processes in processes)
    killed = (trial for trial in kills(random.Random(options.seed), tasks) if trial[0].processes in processes)
    while sum(i.act == "kill" for outcome in done for i, _ in outcome.interruptions) < n_kills:
        yield next(killed)


def main(args: list[str]) -> int:
    """Run the harness; return the exit code."""
    options = parse(args)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job and its children ignore it
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    os.chdir(folder)
    write_data()
    if options.signals:
        return int(signals.table(signals.cells()) > 0)
    harness = Harness()
    for settings, interruptions in trials(options, outcomes):
        settings = replace(settings, asynchronous=options.asynchronous, sharded=options.sharded)
        outcome = harness.trial(settings, interruptions)
        outcomes.append(outcome)
        for line in outcome.lines():
            print(line, flush=True)
    print(f"\n{table(outcomes)}\n")
    failed = sum(outcome.difference is not None for outcome in outcomes)
    print(f"{len(outcomes)} runs in {time.monotonic() - begun:.0f} s; {failed} of them not exact")
    if failed:
        print(f"The runs that are not exact are kept in {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
