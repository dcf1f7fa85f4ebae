"""Checkpoints whose parts have other kinds or values than training saves: each ends in one line that names the file.

Every part of a checkpoint that a command reads, and every part of these, is replaced in turn by a number, text, None, a
tensor, an empty list and an empty mapping, and deleted. A change ends in one message, or the command runs to its end.
"""

import copy
import io
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn.cli import main
from tests.support.commands import fails, spec

PARTS = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states"),
    *("lr_schedulers", "random_states", "logged", "memory_carry", "TextStream", "hparams_name"),
}
"""The parts beside the configuration, whose names have tests of their own."""
VALUES: dict[str, Any] = {
    "a number": -7.5,
    "text": "x",
    "None": None,
    "a tensor": torch.full((2, 3), float("nan")),
    "an empty list": [],
    "an empty mapping": {},
}
DELETED = "nothing"
PIXELS = {
    "model": spec(
        "PixelModel",
        backbone=spec(
            "Transformer", d_model=8, n_heads=2, n_layers=1, attention=spec("PerformerAttention", n_features=4)
        ),
        optimizer=spec("torch.optim.AdamW", lr=0.001),
        lr_scheduler=spec("WarmupCosine", warmup_steps=1),
    ),
    "data": spec("PixelSequences", dataset="digits", batch_size=8),
    "trainer": {
        "max_steps": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "val_check_interval": 1,
        "enable_progress_bar": False,
        "logger": False,
        "callbacks": [spec("FeatureRedraw", every_n_steps=2), spec("EarlyStopping", monitor="val/bits_per_dim")],
    },
}
TEXT = {
    "model": spec(
        "LanguageModel",
        backbone=spec(
            "Transformer",
            d_model=8,
            n_heads=2,
            n_layers=1,
            positions=None,
            attention=spec("TransformerXLAttention", mem_len=4),
        ),
        optimizer=spec("torch.optim.SGD", lr=0.1, momentum=0.9),
        lr_scheduler={"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
    ),
    "data": spec("TextStream", source="files", root="texts", segment_len=8, batch_size=2),
    "trainer": {
        **{name: value for name, value in PIXELS["trainer"].items() if name != "callbacks"},
        "max_epochs": 9,
        "callbacks": [{"class_path": "MemoryCarry"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of pixels and one of text."""
    folder = tmp_path_factory.mktemp("broken")
    for split in ("train", "val", "test"):
        (folder / "texts" / split).mkdir(parents=True)
        (folder / "texts" / split / "a.txt").write_text("a rose is a rose is a rose.\n" * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, settings in (("pixels", PIXELS), ("text", TEXT)):
            Path(f"{name}.yaml").write_text(yaml.safe_dump(settings))
            main(["fit", "--config", f"{name}.yaml"])
            next(Path("runs").rglob("last.ckpt")).rename(f"{name}.ckpt")
            shutil.rmtree("runs")
    return folder


def paths(content: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to the parts of a content, and to the parts of these; of many, to the first three."""
    for name in PARTS & content.keys():
        yield (name,)
        part = content[name]
        if isinstance(part, (dict, list, tuple)):
            yield from ((name, inside) for inside in [*part][:3] if isinstance(part, dict))
            yield from ((name, i) for i in range(min(len(part), 3)) if not isinstance(part, dict))


def changed(content: dict[str, Any], path: tuple[Any, ...], what: Any) -> dict[str, Any]:
    """Return a content with another value, or a function of the value, at a path; or without it."""
    content = copy.deepcopy(content)
    part: Any = content
    for name in path[:-1]:
        if isinstance(part[name], tuple):
            part[name] = list(part[name])
        part = part[name]
    if what == DELETED:
        del part[path[-1]]
    else:
        part[path[-1]] = what(part[path[-1]]) if callable(what) else copy.deepcopy(VALUES[what])
    return content


def outcome(args: list[str]) -> str:
    """Run a command; return "ended", or the message of its error, which must be one line."""
    err = io.StringIO()
    code: Any = 0
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        try:
            main(args)
        except SystemExit as stopped:
            code = stopped.code
    if not code:
        return "ended"
    output = err.getvalue()
    message = output[output.rindex("lit-effattn: error: ") :]
    assert code == 1, output
    assert "Traceback" not in output
    assert len(message.splitlines()) <= 2, message
    assert len(message) < 1200, message
    return message.splitlines()[0]


def command(name: str, how: str) -> list[str]:
    more = {
        "fit": ["--trainer.max_steps", "4", "--trainer.default_root_dir", "resumed"],
        "test": [],
        "generate": ["--n", "1", "--output", "made"] if name == "pixels" else ["--prompt", "a", "--n_tokens", "4"],
    }
    return [how, "--config", f"{name}.yaml", "--ckpt_path", "it.ckpt", *more[how]]


def tries(folder: Path, name: str, how: str, chosen: list[Any]) -> None:
    """Try changes; each must end in a line, or let the command run to its end."""
    content = torch.load(folder / f"{name}.ckpt", weights_only=True)
    counts: Counter[str] = Counter()
    for path, what in chosen:
        torch.save(changed(content, path, what), folder / "it.ckpt")
        shutil.rmtree(folder / "made", ignore_errors=True)
        shutil.rmtree(folder / "resumed", ignore_errors=True)
        try:
            ended = outcome(command(name, how))
        except Exception as error:
            raise AssertionError(f"{how}: {path} as {what}: {type(error).__name__}: {error}") from error
        counts["ended" if ended == "ended" else "one line"] += 1
    assert counts["one line"] > 0 or how != "fit"


def all_cases(folder: Path, name: str) -> list[Any]:
    content = torch.load(folder / f"{name}.ckpt", weights_only=True)
    return [(path, what) for path in sorted(paths(content), key=str) for what in (*VALUES, DELETED)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["pixels", "text"])
@pytest.mark.parametrize(("how", "every"), [("fit", 1), ("test", 4), ("generate", 8)])
def test_every_change(how: str, every: int, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    tries(folder, name, how, all_cases(folder, name)[::every])


LOADERS = ("loops", "fit_loop", "state_dict", "combined_loader")
OPTIMIZER_STEPS = (
    *("loops", "fit_loop", "epoch_loop.automatic_optimization.optim_progress"),
    *("optimizer", "step", "total", "completed"),
)
MEMORY = "memory_carry of the checkpoint is not a memory of this model: "
REFUSED: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("pixels", ("optimizer_states",), "an empty list", "optimizer_states is a list of 0, not a list of 1"),
    ("pixels", ("lr_schedulers",), "an empty list", "lr_schedulers is a list of 0, not a list of 1"),
    ("pixels", ("optimizer_states", 0, "state", 0, "exp_avg"), "a tensor", "exp_avg is a tensor of shape (2, 3)"),
    ("pixels", ("random_states", 0, "torch"), "text", "the random states of the checkpoint can't be restored"),
    ("pixels", ("random_states", 0, "numpy", 2), "a number", "random states of the checkpoint can't be restored"),
    ("pixels", ("state_dict",), "text", "state_dict is the text 'x', not a mapping"),
    ("pixels", ("state_dict", "embedding.weight"), "None", "state_dict['embedding.weight'] is None, not a tensor"),
    ("pixels", ("callbacks",), "a number", "it.ckpt can't be restored: its part callbacks is not as lit-effattn"),
    (
        "pixels",
        ("optimizer_states", 0, "state"),
        "an empty mapping",
        "state is a mapping of 0, not that of AdamW after",
    ),
    ("pixels", ("optimizer_states", 0, "state", 0, "step"), "a number", "state[0].step is -7.5, not a count"),
    ("pixels", ("lr_schedulers", 0), "an empty mapping", "lr_schedulers[0] has no cosine_from_start, "),
    ("pixels", ("global_step",), lambda step: -step, "it.ckpt can't be restored: global_step is -2, not a count"),
    ("pixels", ("loops", "fit_loop"), DELETED, "it.ckpt can't be restored: loops.fit_loop is None, not a mapping"),
    ("pixels", OPTIMIZER_STEPS, "a number", "step.total.completed is -7.5, not a count"),
    ("pixels", ("loops",), DELETED, "has no loops: it holds a model, not a run that can be resumed"),
    ("pixels", ("pytorch-lightning_version",), "text", "it.ckpt can't be restored: Invalid version: 'x'"),
    ("pixels", (*LOADERS, 0, "batches"), "None", "loader has batches='None', which must be a count"),
    ("pixels", LOADERS, "an empty list", "combined_loader has 0 positions in the training data"),
    ("pixels", LOADERS, DELETED, "which have 1 loaders with one; resume from another checkpoint of the run"),
    ("text", ("memory_carry", 0, 0), "a number", f"{MEMORY}a tensor of 1 dimensions was expected in a state, and -7.5"),
    ("text", ("memory_carry", 0, 0), "None", "was expected in a state, and None was found"),
    ("text", ("memory_carry", 0, 1), "text", f"{MEMORY}a state of 1 parts was expected, and 'x' was found"),
    ("text", ("memory_carry", 0, 1, 0, 0), "a tensor", "was expected in a state, and a tensor of 2 dimensions"),
    ("text", ("memory_carry", 0, 0), lambda length: length[:1], "its tensors have [1, 2] rows"),
    ("text", ("memory_carry", 0, 0), torch.Tensor.float, "type torch.int64 was expected, and one of torch.float32"),
    ("pixels", LOADERS, lambda positions: positions * 2, "has 2 positions in the training data, which have 1 loaders"),
]


def test_what_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(folder)
    for name, path, what, words in REFUSED:
        torch.save(changed(torch.load(f"{name}.ckpt", weights_only=True), path, what), "it.ckpt")
        message = fails(capsys, *command(name, "fit"))
        assert words in message, (path, what)
        assert "checkpoint" in message or "it.ckpt" in message


@pytest.mark.exhaustive
def test_the_unchanged_run_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Else each change above could end for another reason."""
    monkeypatch.chdir(folder)
    for name in ("pixels", "text"):
        for how in ("fit", "test", "generate"):
            shutil.copy(f"{name}.ckpt", "it.ckpt")
            shutil.rmtree("made", ignore_errors=True)
            assert outcome(command(name, how)) == "ended"
