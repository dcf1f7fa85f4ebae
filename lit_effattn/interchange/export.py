"""Write a trained model for other programs: a streaming step as ONNX or by `torch.export`, or the weights alone.

The step reads one token of each row and a state, and returns the next token's log-probabilities and the next state:

    log_probs, *state = step(tokens, *state)

so a program that serves it carries the state itself. All shapes are final.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lit_effattn
from lit_effattn.attention.base import Attention
from lit_effattn.attention.positions import n_positions
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.hparams import spec
from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime.differences import largest, largest_difference
from lit_effattn.sequence import SequenceModule, State, donated, map_tensors, tensors
from lit_effattn.tasks import LanguageModel, PixelModel
from lit_effattn.tasks.base import Task

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
"""The formats, and how the names of their files end."""

METADATA = "lit_effattn"
"""Name of the metadata in a file: JSON."""

CHECKED = 32
"""Tokens for which a step is compared with PyTorch before its file is written."""

EQUAL = 1e-3
"""Largest difference of log-probabilities that is taken for rounding."""

_MOST_BYTES = 2_000_000_000
"""Of an ONNX file, which is one protobuf message of less than 2 GiB."""

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "safetensors": ("safetensors",)}


class Exported(NamedTuple):
    """What was written.

    Attributes:
        path: The file.
        checked: Number of tokens for which the file was compared with PyTorch.
        difference: The largest difference of a log-probability.
        seconds: Median of the seconds a token of the file: by onnxruntime, or by PyTorch from the loaded program.
        seconds_here: That of the model in PyTorch, as `generate` runs it.
    """

    path: Path
    checked: int = 0
    difference: float = 0.0
    seconds: float = 0.0
    seconds_here: float = 0.0


class Step(nn.Module):
    """One token of each row: `log_probs, *state = step(tokens, *state)`.

    Args:
        task: The model.
        empty: The state before the first token, made with final shapes.
    """

    def __init__(self, task: LanguageModel | PixelModel, empty: State) -> None:
        super().__init__()
        self.embedding: nn.Module = task.embedding
        self.scale: float = getattr(task, "embedding_scale", 1.0)
        self.backbone: SequenceModule = task.backbone
        self.head: Head = task.head
        self._empty = empty

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """(B, 1) -> (B, n_levels) log-probabilities of the next token, and the tensors of the next state."""
        x = self.scale * self.embedding(tokens)  # (B, 1, d_input)
        y, after = self.backbone(x, _with_tensors(self._empty, state))  # (B, 1, E)
        log_probs = self.head.log_probs(y[:, -1])
        # In ONNX an input is no output: what the step leaves as it is has to be copied.
        return log_probs, *(t.clone() if any(t is s for s in state) else t for t in tensors(after))


def _with_tensors(state: State, given: Iterable[Tensor]) -> State:
    """Return a state of the same structure, of other tensors."""
    left = iter(given)
    return map_tensors(lambda _: next(left), state)


def export(
    task: Task,
    target: Path,
    *,
    format: str,
    max_len: int | None = None,
    batch_size: int = 1,
    check: int = CHECKED,
    overwrite: bool = False,
) -> Exported:
    """Write a model into a file, which is whole or absent.

    Args:
        task: The model. A step is exported in evaluation mode, with the memory of evaluation.
        target: The file.
        format: "onnx" or "torch": a step, as a program. "safetensors": the weights, of any task.
        max_len: Most positions of a stream, for a step of attention that keeps every position. Default: the number of
            dimensions of an image, else that of the positions that have a vector; none with other positions.
        batch_size: Rows of the step.
        check: Number of random tokens for which the file's results are compared with PyTorch's.
        overwrite: Whether to replace an existing file.

    Raises:
        FileExistsError: There is a `target`, and `overwrite` is False.
        ValueError: The task has no step, its state has no final shapes, an option is out of range, a package is
            missing, the format can't express the step, or the file's results differ from PyTorch's or are not finite.
    """
    if format not in SUFFIXES:
        raise ValueError(f"format={format!r} is not one of {', '.join(SUFFIXES)}")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; name another file, or give --overwrite")
    missing = [name for name in _PACKAGES[format] if find_spec(name) is None]
    if missing:
        raise ValueError(f"format={format} needs {', '.join(missing)}: pip install 'lit-effattn[export]'")
    task.eval()
    if format == "safetensors":
        return _written(target, lambda part: _write_weights(task, part))
    for name, value, least in (("batch_size", batch_size, 1), ("check", check, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    model = _streaming(task, format)
    model.on_validation_start()  # the memory of evaluation
    try:
        room = _room(model, max_len)
        empty = model.backbone.initial_state(batch_size, max_len=room)
        step = Step(model, empty).eval()
        longest = n_positions(model.backbone) if room is None else room
        text = json.dumps(_metadata(model, empty, batch_size, longest), ensure_ascii=False)
        n = check if longest is None else min(check, longest)
        write = _write_onnx if format == "onnx" else _write_torch
        return _written(target, lambda part: _checked(write(step, empty, text, part), step, empty, n))
    finally:
        model.on_validation_end()


def _streaming(task: Task, format: str) -> LanguageModel | PixelModel:
    if not isinstance(task, LanguageModel | PixelModel):
        raise ValueError(
            f"{type(task).__name__} has no streaming step, so format={format} is not supported: LanguageModel and "
            "PixelModel have one; format=safetensors writes the weights of any model"
        )
    return task


def _room(model: LanguageModel | PixelModel, max_len: int | None) -> int | None:
    """Return the number of positions to make the state for; None: its shapes are final without.

    Raises:
        ValueError: the state has no final shapes.
    """
    bound = model.backbone.bounded_by
    if bound is None:
        if max_len is not None:
            raise ValueError(f"max_len={max_len} does not apply: the state has a fixed size; leave it out")
        return None
    longest = n_positions(model.backbone)
    if max_len is None and isinstance(model, PixelModel):
        return model.n_dims
    if max_len is None and longest is not None:
        return longest
    if max_len is None:
        kinds = ", ".join(dict.fromkeys(_kinds(model.backbone, growing=True)))
        trained = f", or train with the option {bound}" if bound else ""
        raise ValueError(
            f"{kinds} keeps every position, so the shapes of its state are not final: give --max_len, the most "
            f"positions of a stream{trained}"
        )
    if max_len < 1:
        raise ValueError(f"max_len={max_len} must be at least 1")
    if longest is not None and max_len > longest:
        raise ValueError(f"max_len={max_len}: the model has vectors for {longest} positions; give at most {longest}")
    return max_len


def _kinds(backbone: nn.Module, *, growing: bool = False) -> list[str]:
    """Return the class of every attention, or of those whose state grows; of a backbone without any its own."""
    found = [m for m in backbone.modules() if isinstance(m, Attention)]
    kept = [m for m in found if m.bounded_by is not None] if growing else found
    return [type(m).__name__ for m in kept] or [type(backbone).__name__]


# ------------------------------------------------------------------------------------------------------- the metadata


def _metadata(model: LanguageModel | PixelModel, empty: State, batch_size: int, max_len: int | None) -> dict[str, Any]:
    """Return what a program needs to know to serve the step, as plain data. `max_len`: see `export`."""
    about: dict[str, Any] = {
        "version": lit_effattn.__version__,
        "task": type(model).__name__,
        "kinds": _kinds(model.backbone),
        "dtype": _name(next(model.parameters()).dtype),
        "batch_size": batch_size,
        "max_len": max_len,
        "n_levels": model.head.n_levels,
        "state": [_described(name, t) for name, t in zip(state_names(empty), tensors(empty), strict=True)],
    }
    if isinstance(model, PixelModel):
        return about | {"start": model.n_levels, "image_shape": list(model.image_shape)}
    if model.tokenizer is None:
        return about | {"start": None, "vocabulary": None}
    tokenizer = Tokenizer.from_spec(model.tokenizer)
    return about | {"start": tokenizer.start, "vocabulary": tokenizer.kind, "tokenizer": tokenizer.spec()}


def state_names(state: State, prefix: str = "state") -> list[str]:
    """Return a name for each tensor of a state, by the fields that lead to it: `state.layers.0.s`."""
    if isinstance(state, Tensor):
        return [prefix]
    if state is None:
        return []
    fields: Sequence[Any] = getattr(state, "_fields", range(len(state)))
    return [name for field, part in zip(fields, state, strict=True) for name in state_names(part, f"{prefix}.{field}")]


def _described(name: str, t: Tensor) -> dict[str, Any]:
    """Describe a tensor of the empty state, whose values are equal within each row."""
    first = (slice(None),) + (slice(1),) * (t.dim() - 1)
    rows = t[first]  # (B, 1, …, 1)
    if not torch.equal(t, rows.expand_as(t)):
        raise ValueError(f"{name} of the empty state has several values in a row, which the metadata can't describe")
    fill = rows.tolist() if rows.unique().numel() > 1 else rows[0].item() if t.numel() else 0
    return {"name": name, "shape": list(t.shape), "dtype": _name(t.dtype), "fill": _as_json(fill)}


def _as_json(value: Any) -> Any:
    """Return numbers, in lists or not, with infinities as text, since JSON has none."""
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    return value if np.isfinite(value) else str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------------------------------- the formats

_Run = Callable[[Tensor, list[Any]], tuple[Any, list[Any]]]
"""Reads tokens (B, 1) and the tensors of a state; returns log-probabilities and those of the next state."""


def _write_onnx(step: Step, empty: State, metadata: str, path: Path) -> _Run:
    size = sum(t.numel() * t.element_size() for t in step.state_dict().values())
    if size > _MOST_BYTES:
        raise ValueError(f"the model has {size / 1e9:.1f} GB, and an ONNX file at most 2 GB; use format=torch")
    names = state_names(empty)
    with _quiet(), _as_one_sentence(step, "onnx"):
        program = torch.onnx.export(
            _program(step, empty),
            dynamo=True,
            verbose=False,
            input_names=["tokens", *names],
            output_names=["log_probs", *(f"next_{name}" for name in names)],
            optimize=False,
            custom_translation_table={
                torch.ops.aten.cos.default: _cos,
                torch.ops.aten.sort.stable: _stable_sort,
                torch.ops.aten.searchsorted.Tensor: _search_sorted,
            },
        )
        assert program is not None
        _optimise(program.model)
        program.model.metadata_props[METADATA] = metadata
        program.save(path)
    return _onnx_run(path, names)


def _cos(x: Any) -> Any:
    """Translate torch.cos. In float64 it is sin(x + π/2): onnxruntime 1.23, the last for Python 3.10, has no cosine."""
    import onnx
    import onnxscript

    op: Any = onnxscript.opset18
    if x.dtype != onnx.TensorProto.DOUBLE:
        return op.Cos(x)
    quarter = onnx.helper.make_tensor("quarter", onnx.TensorProto.DOUBLE, [], [math.pi / 2])
    return op.Sin(op.Add(x, op.Constant(value=quarter)))


def _stable_sort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """Translate torch.sort, which the converter knows only without `stable`. TopK leaves equal values in order."""
    import onnxscript

    op: Any = onnxscript.opset18
    size = op.Constant(value_ints=[x.shape[dim]])
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


def _search_sorted(
    sorted_sequence: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """Translate torch.searchsorted, which the converter does not know: count the smaller (or equal) elements."""
    import onnxscript

    if out_int32 or side is not None or sorter is not None:
        raise NotImplementedError("searchsorted with out_int32, side or sorter")
    op: Any = onnxscript.opset18
    last = op.Constant(value_ints=[-1])
    elements, values = op.Unsqueeze(sorted_sequence, op.Constant(value_ints=[-2])), op.Unsqueeze(x, last)
    before = op.LessOrEqual(elements, values) if right else op.Less(elements, values)
    return op.ReduceSum(op.Cast(before, to=7), last, keepdims=0)  # 7: int64


def _optimise(model: Any) -> None:
    """Compute constants beforehand, and leave out what is computed twice or not used.

    These passes change no number. Those that the exporter would run also drop an addition of any constant up to 10⁻⁸
    and a multiplication by any within 10⁻⁵ of 1.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    ):
        step(model)


def _onnx_run(path: Path, names: list[str]) -> _Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def run(tokens: Tensor, state: list[Any]) -> tuple[Any, list[Any]]:
        arrays = [t.numpy() if isinstance(t, Tensor) else t for t in state]
        log_probs, *after = session.run(None, {"tokens": tokens.numpy(), **dict(zip(names, arrays, strict=True))})
        return torch.from_numpy(log_probs), after

    return run


def _write_torch(step: Step, empty: State, metadata: str, path: Path) -> _Run:
    with _quiet(), _as_one_sentence(step, "torch"):
        with path.open("wb") as file:
            torch.export.save(_program(step, empty), file, extra_files={METADATA: metadata})
        with path.open("rb") as written:
            loaded = torch.export.load(written).module()

    def run(tokens: Tensor, state: list[Any]) -> tuple[Any, list[Any]]:
        log_probs, *after = loaded(tokens, *state)
        return log_probs, after

    return run


def _program(step: Step, empty: State) -> torch.export.ExportedProgram:
    given = list(tensors(empty))
    tokens = torch.zeros(given[0].size(0), 1, dtype=torch.long)
    with torch.no_grad():
        return torch.export.export(step, (tokens, *given), strict=False)


def _write_weights(task: Task, path: Path) -> Exported:
    from safetensors.torch import save_file

    weights = {name: t.detach().clone().contiguous() for name, t in task.state_dict().items()}
    about = {"version": lit_effattn.__version__, "model": spec(task)}
    save_file(weights, path, {"format": "pt", METADATA: json.dumps(about, ensure_ascii=False)})
    return Exported(path)


@contextmanager
def _as_one_sentence(step: Step, format: str) -> Iterator[None]:
    """Say which kinds the format can't express."""
    try:
        yield
    except Exception as error:  # torch.export and the converters raise errors of many types
        kinds = ", ".join(dict.fromkeys([type(step.embedding).__name__, *_kinds(step.backbone)]))
        raise ValueError(f"a step of {kinds} can't be exported with format={format}: {_reason(error)}") from error


_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _reason(error: BaseException) -> str:
    """Return the first line of the error that began it: the converter's own one names the step that failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = _COLOUR.sub("", str(error)).strip()
    missing = re.match(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if missing is not None:
        return f"No ONNX function found for {missing[1]}"
    return text.partition("\n")[0] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the remarks of the converters, which no user can act upon."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ------------------------------------------------------------------------------------------------- checked and written


def _checked(run: _Run, step: Step, empty: State, n: int) -> Exported:
    """Compare a file with the model on `n` random tokens, one after another, each with its own state.

    Raises:
        ValueError: they differ.
    """
    rows = next(tensors(empty)).size(0)
    levels = step.head.n_levels
    tokens = torch.randint(0, levels, (n, rows, 1), generator=torch.Generator().manual_seed(0))
    theirs: list[Any] = list(tensors(empty))
    ours = map_tensors(torch.clone, empty)
    differences: list[float] = []
    seconds, seconds_here = [], []
    for i, token in enumerate(tokens):
        start = time.perf_counter()
        found, theirs = run(token, theirs)
        between = time.perf_counter()
        with torch.no_grad(), donated():
            expected, *after = step(token, *tensors(ours))
        seconds.append(between - start)
        seconds_here.append(time.perf_counter() - between)
        ours = _with_tensors(ours, after)
        differences.append(_difference(found, expected, i))
    if not n:
        return Exported(Path())
    return Exported(Path(), n, largest(differences), median(seconds), median(seconds_here))


def _difference(found: Tensor, expected: Tensor, i: int) -> float:
    """Return how far the log-probabilities after token `i` are from PyTorch's.

    Raises:
        ValueError: too far, or one of them is not finite.
    """
    for name, values in (("model", expected), ("exported step", found)):
        if not values.isfinite().all():
            raise ValueError(f"the {name}'s log-probabilities after token {i} are not finite; nothing was written")
    difference = largest_difference([found], [expected])
    if difference > EQUAL:
        raise ValueError(
            f"the exported step differs by {difference:.1e} from PyTorch's after token {i}; nothing was written"
        )
    return difference


def _written(target: Path, write: Callable[[Path], Exported]) -> Exported:
    """Write a file beside its place, and move it there when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        done = write(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return done._replace(path=target)
