"""`lit-effattn sweep` and `compare`, with runs of four steps in this process."""

import csv
import io
import signal
from collections.abc import Iterable
from itertools import pairwise, repeat
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_effattn.analysis.sweep import (
    RECORD,
    Child,
    Sweep,
    _devices,
    _rates,
    parse_kind,
    read_record,
    sweep,
    write_tables,
)
from lit_effattn.analysis.sweep_tables import Cell, Outcome, best_rate
from lit_effattn.callbacks import CostLog
from lit_effattn.checkpoints.runs import new_folder
from lit_effattn.cli import main
from lit_effattn.settings.arguments import File
from lit_effattn.stopping import Stopped
from tests.support.commands import REPOSITORY, fails, spec

BACKBONE = spec("Transformer", d_model=8, n_heads=2, n_layers=1, attention="LinearAttention")
CONFIG = {
    "model": spec("LanguageModel", backbone=BACKBONE, accuracy=True, optimizer=spec("torch.optim.AdamW", lr=0.003)),
    "data": spec("StateTracking", group="parity", length=6, batch_size=8, n_train=32, n_val=8, n_test=8),
    "trainer": {"max_epochs": 1, "val_check_interval": 2, "log_every_n_steps": 1},
}
KINDS = {"LinearAttention": parse_kind("linear")[1], "Missing": ["--model.backbone.attention", "no_such.Missing"]}
RATES = (0.001, 0.01)
FLAGS = ["--config", "tiny.yaml", "--trainer.enable_model_summary", "false"]


def ended(code: int = 0, reason: str = "") -> Any:
    """Return a child process that has ended with an exit code and a message."""
    return SimpleNamespace(poll=lambda: code, wait=lambda: code, message=lambda: reason, terminate=lambda: None)


class Children:
    """Runs commands in this process; the one with the number `stopped` gets SIGTERM after its second step."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.stopped: int | None = None

    def __call__(self, args: list[str], log: Path, device: str | None) -> Any:
        self.calls.append(args)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if len(self.calls) == self.stopped:
                    patch.setattr(CostLog, "on_train_batch_end", _stop)
                main(args)
        except SystemExit as end:
            return ended(int(end.code or 0), "its reason")
        return ended()


def _stop(_: CostLog, trainer: pl.Trainer, *__: Any) -> None:
    if trainer.global_step == 2:
        signal.raise_signal(signal.SIGTERM)


def cells(rates: tuple[float, ...], seeds: int) -> list[Cell]:
    return [Cell(kind, rate, seed) for kind in KINDS for rate in rates for seed in range(seeds)]


def checkpoints(folder: Path) -> None:
    """Write the names of a run's checkpoints."""
    run = new_folder(folder, "2026-01-01_00-00-00") / "checkpoints"
    run.mkdir()
    for name in ("last.ckpt", "best.ckpt"):
        (run / name).touch()


def starting(codes: Iterable[int] = repeat(0)) -> tuple[list[list[str]], Any]:
    """Return a list of calls, and a function that adds to it and writes checkpoints in place of a run."""
    calls: list[list[str]] = []
    ends = iter(codes)

    def start(args: list[str], log: Path, device: str | None) -> Any:
        calls.append(args)
        checkpoints(log.parent)
        return ended(next(ends))

    return calls, start


def call(made: Sweep, cell: Cell, name: str) -> str | None:
    """Run one command of a cell, and return the reason for its failure."""
    steps = made._call(cell, name, None)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep that was stopped in its second run and then went on: its folder, its calls and its outcomes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sweep")
        patch.chdir(folder)
        Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
        children = Children()
        children.stopped = 2
        with pytest.raises(Stopped) as stopped:
            Sweep(Path("out"), FLAGS, KINDS, start=children).run(cells(RATES, 1))
        assert stopped.value.code == 143
        before = len(children.calls)
        sweep = Sweep(Path("out"), FLAGS, KINDS, start=children)
        sweep.run(cells(RATES, 1))
        chosen = {"LinearAttention": best_rate("LinearAttention", sweep.outcomes)}
        assert best_rate("Missing", sweep.outcomes) is None
        sweep.run([Cell("LinearAttention", chosen["LinearAttention"], seed) for seed in (0, 1)], test=True)
        write_tables(Path("out"), list(KINDS), RATES, chosen, sweep.outcomes)
        yield folder, children.calls[before:], sweep.outcomes, chosen["LinearAttention"]


def log_of(run: Path, name: str) -> list[float]:
    """All values of a column, read here."""
    values = []
    for path in sorted(run.glob("csv/version_*/metrics.csv")):
        with path.open() as file:
            values += [float(row[name]) for row in csv.DictReader(file) if row.get(name)]
    return values


def test_a_stopped_sweep_resumes_its_run_repeats_none_and_chooses_the_best_rate(swept):
    folder, calls, outcomes, chosen = swept
    with pytest.raises(ValueError, match=r"--config tiny\.yaml"):
        Sweep(folder / "out", ["--config", "other.yaml"], KINDS)
    fits = [call for call in calls if call[0] == "fit" and "LinearAttention" in call]
    assert [call[call.index("--model.optimizer.lr") + 1] for call in fits[:1]] == ["0.01"]  # 0.001 was finished
    assert "--ckpt_path" in fits[0]
    assert all("--ckpt_path" not in call for call in fits[1:])
    assert len(fits) == 2  # the half-done one and seed 1
    assert sum(call[0] == "test" for call in calls) == 2
    for cell in cells(RATES, 1)[:2]:
        run = outcomes[cell].record.path
        assert torch.load(folder / run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
        assert len(list((folder / "out" / str(cell)).glob("*/checkpoints"))) == 1
    lowest = {c.rate: min(log_of(folder / outcomes[c].record.path, "val/perplexity")) for c in cells(RATES, 1)[:2]}
    assert chosen == min(lowest, key=lowest.__getitem__)


def test_the_table_has_means_and_deviations_over_seeds_and_the_refusals(swept):
    folder, _, outcomes, chosen = swept
    linear, missing = csv.DictReader((folder / "out/table.csv").open())
    runs = [folder / outcomes[Cell("LinearAttention", chosen, seed)].record.path for seed in (0, 1)]
    for name, values in (
        ("test/accuracy_48", [log_of(run, "test/accuracy_48")[-1] for run in runs]),
        ("val/perplexity", [min(log_of(run, "val/perplexity")) for run in runs]),
    ):
        assert float(linear[name]) == pytest.approx(mean(values))
        assert float(linear[f"± {name}"]) == pytest.approx(stdev(values))
    assert (linear["seeds"], linear["refused"], float(linear["rate"])) == ("2", "", chosen)
    assert (missing["kind"], missing["refused"], missing["val/perplexity"]) == ("Missing", "its reason", "")
    text = (folder / "out/table.md").read_text()
    assert "| Missing | its reason | its reason |" in text
    assert " ± " in text


def test_two_classes_of_one_name_do_not_share_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls, start = starting()
    monkeypatch.setattr(Sweep, "_outcome", lambda self, cell, reason: Outcome(None, "not read here"))
    for kind in ("a.Mine", "b.Mine", "a.Mine"):
        name, flags = parse_kind(kind)
        Sweep(tmp_path, FLAGS, {name: flags}, start=start).run([Cell(name, 0.1, 0)])
    assert [kind for call in calls for kind in ("a.Mine", "b.Mine") if kind in call] == ["a.Mine", "b.Mine"]


def test_compare_shows_what_differs_and_what_it_costs(swept, monkeypatch, capsys):
    folder, _, outcomes, _ = swept
    monkeypatch.chdir(folder)
    paths = [str(outcomes[cell].record.path) for cell in cells(RATES, 1)[:2]]
    capsys.readouterr()
    main(["compare", *paths, "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["model.optimizer.lr"]) for row in rows] == [0.001, 0.01]
    assert not any(name.startswith("data.") for name in rows[0])
    state = torch.load(folder / paths[0] / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert [int(row["parameters"]) for row in rows] == 2 * [sum(t.numel() for t in state.values())]
    assert float(rows[1]["val/accuracy"]) == pytest.approx(log_of(Path(paths[1]), "val/accuracy")[-1])
    assert all(0 < float(row["s/step"]) < 60 and int(row["peak process bytes"]) > 2**25 for row in rows)
    main(["compare", *paths, "--format", "markdown"])
    assert "| model.optimizer.lr | 0.001 | 0.01 |" in capsys.readouterr().out
    main(["compare", *paths])
    assert "model.optimizer.lr" in capsys.readouterr().out
    assert "out is not the folder of a run: it has no config.yaml" in fails(capsys, "compare", "out")


def test_a_childs_error_is_returned(tmp_path):
    (tmp_path / "output.txt").write_text("lit-effattn: error: of an earlier child\n")
    child = Child(["nonsense"], tmp_path / "output.txt", None)
    assert child.wait() == child.poll() == 2
    assert child.message().startswith("'nonsense' is not a command")


def test_names_of_kinds():
    attention = "--model.backbone.attention"
    for given in ("xl", "transformer_xl", "TransformerXLAttention"):
        assert parse_kind(given) == ("TransformerXLAttention", [attention, "TransformerXLAttention"])
    assert parse_kind("my_module.Mine") == ("my_module.Mine", [attention, "my_module.Mine"])
    assert parse_kind("lstm") == ("LSTM", ["--model.backbone", "LSTM"])
    for given in ("", "s", "nonsense"):  # of several or of none
        with pytest.raises(ValueError, match=f"--kinds {given}: give one of .*LinearAttention"):
            parse_kind(given)


def test_options_of_kinds():
    attention = "--model.backbone.attention"
    assert parse_kind("xl:mem_len=64:dropout=0.1") == (
        "TransformerXLAttention:mem_len=64:dropout=0.1",
        [attention, "TransformerXLAttention", f"{attention}.mem_len", "64", f"{attention}.dropout", "0.1"],
    )
    assert parse_kind("lstm:n_layers=1")[1] == ["--model.backbone", "LSTM", "--model.backbone.n_layers", "1"]
    for option in ("mem_len", "=64", "mem_len="):
        with pytest.raises(ValueError, match=f"{option!r} is not an option; give xl:NAME=VALUE"):
            parse_kind(f"xl:{option}")
    for given, options in (
        ("linear:d_model=3", "LinearAttention has no option d_model; there are feature_map"),
        ("linear:chunk=3", "LinearAttention has no option chunk; there are .*chunk_size"),
        ("lstm:d_modle=1", "LSTM has no option d_modle"),
    ):
        with pytest.raises(ValueError, match=f"--kinds {given}: {options}"):
            parse_kind(given)


def test_commas_within_brackets_divide_no_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def start(args: list[str], log: Path, device: str | None) -> Any:
        asked.append(args)
        return ended(1, "not now")

    monkeypatch.setattr(Sweep.__init__, "__defaults__", ((None,), start, ()))
    kinds = "infinite:widths=[0.03,0.1],linear"
    with pytest.raises(ValueError, match=r"no run has succeeded; InfiniteAttention_widths=.*_lr0.001_seed0: .*not now"):
        sweep(["--config", "mqar_linear", "--kinds", kinds, "--lr", "1e-3", "--seeds", "1", "--output", str(tmp_path)])
    first, second = asked
    assert first[first.index("--model.backbone.attention.widths") + 1] == "[0.03,0.1]"
    assert "LinearAttention" in second
    assert ":" not in first[first.index("--trainer.default_root_dir") + 1].removeprefix(str(tmp_path))


def test_the_best_rate_is_run_with_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = []
    monkeypatch.setattr(Sweep, "run", lambda self, cells, test=False: runs.append((cells, test)))
    monkeypatch.setattr("lit_effattn.analysis.sweep.best_rate", lambda kind, outcomes: 0.5)
    monkeypatch.setattr("lit_effattn.analysis.sweep.write_tables", lambda *_: None)
    args = ["--config", "mqar_linear", "--kinds", "linear", "--lr", "0.1,0.5", "--seeds", "3"]
    args += ["--output", str(tmp_path)]
    sweep(args)
    tried = [Cell("LinearAttention", rate, 0) for rate in (0.1, 0.5)]
    assert runs == [(tried, False), ([Cell("LinearAttention", 0.5, seed) for seed in range(3)], True)]


def test_rates():
    assert _rates(None, [File.read(str(REPOSITORY / "configs/mqar_linear.yaml"))]) == [0.001, 0.003, 0.009]
    assert _rates("3e-4,1e-3", []) == [0.0003, 0.001]
    assert _rates(None, [File("own.yaml", {"model": {"optimizer": {"lr": 0.00125}}})]) == [0.00042, 0.00125, 0.0037]
    for rate in (0, -1, float("inf")):
        with pytest.raises(ValueError, match=rf"--lr {rate}: rates must be"):
            _rates(None, [File("own.yaml", {"model": {"optimizer": {"lr": rate}}})])
    for text in ("a", "0", "-1", "inf"):
        with pytest.raises(ValueError, match=f"--lr {text}"):
            _rates(text, [])


def test_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _devices(None) == [None]
    assert _devices("0,1") == ["0", "1"]
    for text in ("0,0", "0,", "a", "2"):
        with pytest.raises(ValueError, match=f"--devices {text}: .* below 2, the number of CUDA devices"):
            _devices(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5ab")
    assert _devices("1,0") == ["GPU-5ab", "4"]


def test_wrong_arguments_are_named_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = {
        "--seeds 0": ["--seeds", "0"],
        "--lr RATE": ["--model.optimizer.init_args.lr", "1"],
        "leave it out": ["--seed_everything=1"],
        "'softmax' is not an option; --kinds takes": ["softmax"],
        "name the kind in --kinds": ["--model.backbone.attention", "SoftmaxAttention"],
        "--devices 0,0: give different": ["--devices", "0,0"],
    }
    for message, args in wrong.items():
        assert message in fails(capsys, "sweep", "--config", "mqar_linear", "--kinds", "linear", *args)
    assert not (tmp_path / "runs").exists()


def test_children_run_side_by_side_and_are_stopped_with_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Instead of the command: Python, which writes its device and then sleeps."""
    script = tmp_path / "command.py"
    script.write_text("import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(60)")
    monkeypatch.setattr("lit_effattn.analysis.sweep.COMMAND", script)

    def sleep(_: float) -> None:
        logs = [tmp_path / str(cell) / "output.txt" for cell in cells[:2]]
        if all(log.is_file() and "\n" in log.read_text() for log in logs):
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    cells = [Cell("LinearAttention", rate, 0) for rate in (0.1, 0.2, 0.3)]
    made = Sweep(tmp_path, FLAGS, KINDS, ("3", "5"))
    with pytest.raises(KeyboardInterrupt):
        made.run(cells)
    assert [child.returncode for child in made._children] == [-signal.SIGTERM] * 2
    assert [(tmp_path / str(cell) / "output.txt").read_text() for cell in cells[:2]] == ["3\n", "5\n"]


def test_a_killed_child_says_so(tmp_path: Path):
    child = Child(["--help"], tmp_path / "log", None)
    child.terminate()
    assert (child.wait(), child.message()) == (-signal.SIGTERM, f"killed by signal {signal.SIGTERM:d}")


def test_a_stopped_child_is_not_done(tmp_path: Path):
    """Also in its test, and before it handles signals."""
    stops = (143, 138, 130, 129, -signal.SIGTERM)
    cell, (_, start) = Cell("LinearAttention", 0.1, 0), starting([0, *stops, 0])
    for code in stops:
        with pytest.raises(Stopped) as stopped:
            Sweep(tmp_path, [], KINDS, start=start).run([cell], test=True)
        assert stopped.value.code == (code if code > 0 else 143)
        assert read_record(tmp_path / RECORD)[1] == {str(cell): ["fit"]}
    assert call(Sweep(tmp_path, [], KINDS, start=start), cell, "test") is None
    assert read_record(tmp_path / RECORD)[1] == {str(cell): ["fit", "test"]}


def test_a_fit_that_writes_no_checkpoint_is_tried_again(tmp_path: Path):
    """Its exit code is 0, as that of `--trainer.fast_dev_run 1`."""
    cell = Cell("LinearAttention", 0.1, 0)
    for _ in range(2):
        made = Sweep(tmp_path, [], KINDS, start=lambda *_: ended())
        assert call(made, cell, "fit") == "it wrote no checkpoint"
    assert not (tmp_path / RECORD).exists()


def test_what_is_trusted_is_trusted_in_tests_too(tmp_path: Path):
    (calls, start), cell = starting(), Cell("LinearAttention", 0.1, 0)
    made = Sweep(tmp_path / "out", [], KINDS, start=start, trust=["mine.Task", "mine.Data"])
    assert [call(made, cell, name) for name in ("fit", "test")] == [None, None]
    assert [args[0] for args in calls] == ["fit", "test"]
    for args in calls:
        assert [value for flag, value in pairwise(args) if flag == "--trust"] == ["mine.Task", "mine.Data"]


def test_a_record_of_something_else(tmp_path: Path):
    ours = ['{"flags": 1}', '{"flags": []}', '{"flags": [], "done": {"a": 3}}']
    for text in ("[" * 100_000, "[]", "no JSON", *ours):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(ValueError, match=r"sweep\.json is not the record of a sweep"):
            read_record(tmp_path / "sweep.json")
