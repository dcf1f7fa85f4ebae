"""The papers' figures in small: trains the runs of docs/reproduce.md one after another, and writes its table.

Runs in the log are not repeated. A run that was killed resumes from its last checkpoint.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Report, Row
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.runs import find_checkpoint

BEGIN, END = "<!-- made by `make reproduce-small`: begin -->", "<!-- made by `make reproduce-small`: end -->"
"""The lines of the page before and after its table."""

NOTES = [
    "The score is that of `lit-effattn test` on the best checkpoint, one run at the configuration's seed.",
    "Minutes and CPU minutes: training and test, if they were not interrupted. Expected: minutes on 2 idle cores.",
]


class Small(NamedTuple):
    """A small run that corresponds to a figure of a paper."""

    name: str
    figure: str
    flags: str  # of `lit-effattn fit`
    metric: str  # as `lit-effattn test` calls it
    minutes: float  # on 2 cores

    @property
    def command(self) -> str:
        """The arguments of the training, without the folder that it writes to."""
        return f"fit --config {self.flags}"


def _steps(n: int, *more: str) -> str:
    """Return the flags for `n` steps with a schedule that ends at 0."""
    return f"--trainer.max_steps {n} --model.lr_scheduler.total_steps {n} {' '.join(more)}".strip()


def _swap(config: str, attention: str, **options: int) -> str:
    """Return the flags for `config` with another attention."""
    flag = "--model.backbone.attention"
    return " ".join([config, flag, attention, *(f"{flag}.{name} {value}" for name, value in options.items())])


_PAGES = Path(__file__).parents[1] / "docs"
_VARIANTS = dict(
    re.findall(r"^\| `(\w+)` \| `--config (.+)` \|$", (_PAGES / "configurations.md").read_text(encoding="utf-8"), re.M)
)
"""Configuration and flags of the variants in docs/configurations.md."""

_COPY_LSH = _VARIANTS["copy_lsh4"]
_PERFORMER = _swap("copy_linear", "PerformerAttention", chunk_size=64)
_LSH = _swap("digits_linear", "LSHAttention", n_hashes=2, n_buckets=4, chunk_size=8)
_INFINITE = _VARIANTS["stdlib_infinite"].partition(" --trainer")[0]
_SPARSE = _steps(600, "--trainer.val_check_interval 600")
_TEXT = _steps(1500, "--trainer.val_check_interval 500")
RUNS = (
    Small("translation", "Vaswani Table 2", f"{_VARIANTS['g2p_softmax']} {_steps(1500)}", "error_rate", 9),
    Small("copy-softmax", "Linear Fig. 2", _swap("copy_linear", "SoftmaxAttention"), "accuracy", 2),
    Small("copy-linear", "Linear Fig. 2", "copy_linear", "accuracy", 2.5),
    Small("copy-lsh-1", "Linear Fig. 2", _COPY_LSH.replace("n_hashes 4", "n_hashes 1"), "accuracy", 2.5),
    Small("copy-lsh-4", "Linear Fig. 2", _COPY_LSH, "accuracy", 4.5),
    Small("copy-performer", "Performer, beside Linear Fig. 2", _PERFORMER, "accuracy", 3.5),
    Small("images-softmax", "Linear Table 1", _swap("digits_linear", "SoftmaxAttention"), "bits/dim", 2.5),
    Small("images-linear", "Linear Table 1", "digits_linear", "bits/dim", 3),
    Small("images-lsh", "Linear Table 1", _LSH, "bits/dim", 3.5),
    Small("images-performer", "Performer Fig. 7", _VARIANTS["digits_performer"], "bits/dim", 4),
    Small("images-sparse", "Sparse Table 2", _swap("digits_linear", "SparseAttention"), "bits/dim", 3),
    Small("text-sparse", "Sparse Table 2", f"text_sparse {_SPARSE}", "bits/byte", 4),
    Small("speech-softmax", "Linear Table 3", _swap("espeak_linear", "SoftmaxAttention"), "PER", 5.5),
    Small("speech-linear", "Linear Table 3", "espeak_linear", "PER", 5.5),
    Small("speech-bilstm", "Linear Table 3", _VARIANTS["espeak_bilstm"], "PER", 4.5),
    Small("text-xl", "XL Table 2", f"stdlib_xl {_TEXT}", "bits/byte", 6),
    Small("text-xl-without-memory", "XL Table 6", f"stdlib_xl {_TEXT} --trainer.callbacks null", "bits/byte", 5),
    Small("text-lstm", "XL Table 2", f"{_VARIANTS['stdlib_lstm']} {_TEXT}", "bits/byte", 3.5),
    Small("text-compressive", "Compressive Table 4", f"{_VARIANTS['stdlib_compressive']} {_TEXT}", "bits/byte", 7.5),
    Small("text-infinite", "∞-former, section 4.2", f"{_INFINITE} {_TEXT}", "bits/byte", 8),
    Small("sorting-infinite", "∞-former, section 4.1", "sorting_small_infinite", "accuracy", 2.5),
    Small("sorting-sticky", "∞-former, section 4.1", _VARIANTS["sorting_small_sticky"], "accuracy", 3),
    Small("sorting-xl", "∞-former, section 4.1", _VARIANTS["sorting_small_xl"], "accuracy", 2.5),
    Small("sorting-compressive", "∞-former, section 4.1", _VARIANTS["sorting_small_compressive"], "accuracy", 3),
    Small("retrieval", "none; beside the copy task", "retrieval_linear", "exact_match", 4),
)
"""At most two hours on 2 cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(run.name for run in RUNS)
    parser.add_argument("--plan", action="store_true", help="print which runs are done and which would run, and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help=f"of {names}")
    parser.add_argument("--root", type=Path, default=Path("runs/reproduce_small"), help="default: %(default)s")
    parser.add_argument("--log", type=Path, default=Path("docs/reproduce-small.jsonl"), help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=Path("docs/reproduce.md"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if unknown := set(args.only) - {small.name for small in RUNS}:
        sys.exit(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(small.name for small in RUNS)}")
    runs = [small for small in RUNS if not args.only or small.name in args.only]
    write_table(args.page, read(args.log))  # an unsuitable page is found before anything runs
    todo = [small for small in runs if (small.name, small.command) not in _done(args.log)]
    minutes = sum(small.minutes for small in todo)
    print(f"To run: {len(todo)} of {len(runs)}, about {minutes:g} minutes on 2 cores", file=sys.stderr, flush=True)
    failures = []
    for small in [] if args.plan else todo:
        try:
            entry = _run(small, args.root)
        except SystemExit as failed:  # the others still run
            failures.append(f"{small.name}: {failed}")
            continue
        _add(entry, args.log)
        write_table(args.page, read(args.log))
    done = _done(args.log)
    rows = [_row(small, done.get((small.name, small.command)), args.root) for small in runs]
    if failures:
        print(*failures, sep="\n", file=sys.stderr)
    return Report("reproduce", rows, [*NOTES, f"Expected for those to run: {minutes:g} minutes.", *failures])


def command(*args: str) -> str:
    """Run the command, show its progress, and return its output."""
    print(f"$ lit-effattn {shlex.join(args)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "lit_effattn.cli", *args], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"lit-effattn {args[0]} failed, see above")
    return done.stdout


def scores(printed: str) -> dict[str, str]:
    """Return the scores in lines such as `test bits/dim: 1.8022` and `test PER: 9.38 %`, without counts."""
    return dict(re.findall(r"^test (\S+): (\d+\.\d+(?: %)?)$", printed, re.M))


def _run(small: Small, root: Path) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one, test, and return the log's entry."""
    folder, start, cpu = _folder(small, root), time.monotonic(), _cpu_seconds()
    last = _last(folder)
    if last is None:
        config, flags = (words := shlex.split(small.command))[:3], words[3:]
        often = ["--checkpoint.every_n_train_steps", "100"]  # the most that a kill loses
        command(*config, *often, "--trainer.default_root_dir", str(folder), *flags)
    else:
        command("fit", "--ckpt_path", str(last))
    best = find_checkpoint("best", folder)
    reported = scores(command("test", "--ckpt_path", str(best)))
    if small.metric not in reported:
        sys.exit(f"`test` reports {', '.join(reported)}, but not {small.metric}")
    return {
        "run": small.name,
        "command": small.command,
        "score": reported[small.metric],
        "metric": small.metric,
        "steps": read_checkpoint(find_checkpoint("last", folder))["global_step"],
        "minutes": round((time.monotonic() - start) / 60, 1) if last is None else None,
        "cpu_minutes": round((_cpu_seconds() - cpu) / 60, 1) if last is None else None,
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _cpu_seconds() -> float:
    """Return the CPU time of the processes that have ended; 0 on Windows."""
    return os.times().children_user + os.times().children_system


def _folder(small: Small, root: Path) -> Path:
    """Return the folder of a command's runs, so that another command's runs are not resumed."""
    return root / hashlib.sha256(small.command.encode()).hexdigest()[:12]


def _last(folder: Path) -> Path | None:
    try:
        return find_checkpoint("last", folder)
    except FileNotFoundError:
        return None


def read(log: Path) -> list[dict[str, Any]]:
    """Return the entries of the log, the oldest first."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def _add(entry: dict[str, Any], log: Path) -> None:
    """Append an entry to the log atomically."""
    new = log.with_name(f"{log.name}.new")
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (*read(log), entry)]
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(log)


def _done(log: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["run"], entry["command"]): entry for entry in read(log)}


def _row(small: Small, entry: dict[str, Any] | None, root: Path) -> Row:
    started = "started" if _last(_folder(small, root)) else "to run"
    return {
        "run": small.name,
        "figure": small.figure,
        "minutes expected": small.minutes,
        "state": "done" if entry else started,
        "score": f"{entry['score']} {entry['metric']}" if entry else None,
        "minutes": entry["minutes"] if entry else None,
        "CPU minutes": entry["cpu_minutes"] if entry else None,
    }


def table(entries: list[dict[str, Any]]) -> str:
    """Return the page's table: each run with its newest entry."""
    done = {(entry["run"], entry["command"]): entry for entry in entries}
    head = "| run | figure | command | minutes expected | score | steps | minutes | CPU minutes | date |"
    lines = [head, f"|{'---|' * 9}"]
    for small in RUNS:
        entry = done.get((small.name, small.command))
        measured = ["not measured", "", "", "", ""]
        if entry is not None:
            minutes = ["resumed" if entry[name] is None else f"{entry[name]:g}" for name in ("minutes", "cpu_minutes")]
            measured = [f"{entry['score']} {entry['metric']}", f"{entry['steps']:,}", *minutes, entry["date"]]
        cells = [small.name, small.figure, f"`{small.command}`", f"{small.minutes:g}", *measured]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table(page: Path, entries: list[dict[str, Any]]) -> None:
    """Write the table to the page, between `BEGIN` and `END`."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"--page {page}: it must have the lines {BEGIN} and {END} once, for the table between them")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{table(entries)}\n\n{END}{after}"
    if new != text:
        page.write_text(new, encoding="utf-8")
