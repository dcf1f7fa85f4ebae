"""Export a trained model: a streaming step as ONNX or by `torch.export`, or the weights only.

The step reads one token of each row, or the sound of one frame, and a state. It returns log-probabilities and the next
state: see `steps`. A program that runs the step carries the state. All shapes are fixed, except that an ONNX file with
the operators of `onnx_operators` reads any number of tokens.
"""

import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.shipped import METADATA
from lit_effattn.checkpoints.weights_files import write_weights_file
from lit_effattn.checks import at_least
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.hparams import spec
from lit_effattn.interchange import onnx_operators
from lit_effattn.interchange.steps import SpeechStep, Step, TokenStep, with_tensors
from lit_effattn.ops.runtime.differences import largest, largest_difference
from lit_effattn.ops.runtime.operators import kept
from lit_effattn.ops.runtime.quiet import quiet
from lit_effattn.sequence import State, donated, map_tensors, tensors
from lit_effattn.tasks import LanguageModel, PixelModel, SpeechRecognizer
from lit_effattn.tasks.base import Task
from lit_effattn.tasks.speech_stream import StreamFeatures, check_causal, stream_features

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
"""The suffix of the files of each format."""

DTYPES = ("float16", "bfloat16", "float32")
"""Types of the weights in a safetensors file."""

CHECKED = 32
"""Default number of steps for which a step is compared with PyTorch before its file is written."""

EQUAL = 1e-3
"""Largest difference of log-probabilities that is accepted as rounding."""

_MOST_BYTES = 2_000_000_000
"""Largest size of an ONNX file, which is one protobuf message of less than 2 GiB."""

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "safetensors": ()}


_Streamed = LanguageModel | PixelModel | SpeechRecognizer


class Exported(NamedTuple):
    """A written file.

    Attributes:
        path: The file.
        unit: What a step reads of each row, "token" or "frame".
        checked: Number of steps for which the file was compared with PyTorch.
        difference: The largest difference of a log-probability.
        seconds: Median time of the file per step: by onnxruntime, or by PyTorch from the loaded program.
        seconds_here: Median time of the model in PyTorch per step, as `generate` runs it.
        prompt_seconds: Time of the file for all checked tokens but the last in one call; None if it reads one.
    """

    path: Path
    unit: str = "token"
    checked: int = 0
    difference: float = 0.0
    seconds: float = 0.0
    seconds_here: float = 0.0
    prompt_seconds: float | None = None


def export(
    task: Task,
    target: Path,
    *,
    format: str,
    max_len: int | None = None,
    batch_size: int = 1,
    check: int = CHECKED,
    overwrite: bool = False,
    saved: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    normalize: str | None = None,
) -> Exported:
    """Export a model to a file. If that fails, no file is written.

    Args:
        task: The model. A step is exported in evaluation mode, with the evaluation memory.
        target: The file.
        format: "onnx" or "torch": a step, as a program. "safetensors": the weights, of any task.
        max_len: The largest number of positions of a stream, for a step of attention that keeps every position.
            Default: the number of dimensions of an image, or of positions that have a vector.
        batch_size: Rows of the step.
        check: Number of random inputs for which the file's results are compared with PyTorch's.
        overwrite: Whether to replace an existing file.
        saved: A checkpoint of the model, such as `read_outline` returns it. safetensors: its counters, last
            metrics and state of the data are written, too, so that all commands can read the file as a checkpoint.
            The step of a recogniser that was trained with `SpeechData` reads samples; without `saved`, features.
        dtype: safetensors: type of the floating-point weights, one of `DTYPES`. Default: as they are.
        normalize: "running": the step of a recogniser normalises by the statistics of the sound so far. Default: as in
            training.

    Raises:
        FileExistsError: If `target` exists and `overwrite` is False.
        ValueError: If the task has no step, its state has no final shapes, an option is out of range, a package is
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
    if normalize is not None and (format == "safetensors" or not isinstance(task, SpeechRecognizer) or saved is None):
        raise ValueError(
            f"normalize={normalize!r} does not apply: it is for the step of a SpeechRecognizer that reads samples"
        )
    if dtype is not None and (dtype not in DTYPES or format != "safetensors"):
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}, and format safetensors, not {format}")
    if format == "safetensors":
        if max_len is not None or batch_size != 1 or check != CHECKED:
            raise ValueError(
                f"max_len={max_len}, batch_size={batch_size} and check={check} are options of a step, which "
                "format=safetensors lacks; leave them out"
            )
        weights = None if dtype is None else getattr(torch, dtype)
        with whole(target) as part:
            write_weights_file(part, task.state_dict(), spec(task), lit_effattn.__version__, saved, weights)
        return Exported(target)
    at_least(1, batch_size=batch_size)
    at_least(0, check=check)
    if not isinstance(task, LanguageModel | PixelModel | SpeechRecognizer):
        raise ValueError(
            f"{type(task).__name__} has no streaming step, so format={format} is not supported: LanguageModel, "
            "PixelModel and SpeechRecognizer have one; format=safetensors writes the weights of any model"
        )
    task.on_validation_start()  # sets the evaluation memory
    try:
        length = _state_length(task, max_len)
        features: StreamFeatures | None = None
        if isinstance(task, SpeechRecognizer):
            check_causal(task)
            features = None if saved is None else stream_features(saved, "the checkpoint", normalize)
            step: Step = SpeechStep(task, batch_size, length, features)
        else:
            step = TokenStep(task, task.backbone.initial_state(batch_size, max_len=length))
        step.eval()
        kinds = [m for m in task.backbone.modules() if isinstance(m, Attention)]
        prompts = format == "onnx" and isinstance(step, TokenStep) and onnx_operators.available(kinds)
        size = sum(t.numel() * t.element_size() for t in step.state_dict().values())
        if format == "onnx" and size > _MOST_BYTES:
            raise ValueError(f"the model has {size / 1e9:.1f} GB, but an ONNX file at most 2 GB; use format=torch")
        longest = n_positions(task.backbone) if length is None else length
        about = _metadata(task, step.empty, batch_size, longest) | _metadata_of_task(task, features)
        text = json.dumps(about, ensure_ascii=False)
        with whole(target) as part:
            with _conversion(step, format):
                run = (
                    _write_onnx(step, text, part, prompts=prompts)
                    if format == "onnx"
                    else _write_torch(step, text, part)
                )
            exported = _checked(run, step, check if longest is None else min(check, longest), prompts=prompts)
        return exported._replace(path=target)
    finally:
        task.on_validation_end()
        # torch.export derives classes of the same names from those of the modules, and leaves them in reference cycles.
        # Until they are collected, a configuration can't name these classes by their short names.
        gc.collect()


def _state_length(model: _Streamed, max_len: int | None) -> int | None:
    """Return the number of positions for which the state is allocated; None if the state has a fixed size."""
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
        remedy = f", or train with the option {bound}" if bound else ""
        raise ValueError(
            f"{kinds} keeps every position, so the shapes of its state are not final: give --max_len, the largest "
            f"number of positions of a stream{remedy}"
        )
    at_least(1, max_len=max_len)
    if longest is not None and max_len > longest:
        raise ValueError(f"max_len={max_len}: the model has vectors for {longest} positions; give at most {longest}")
    return max_len


def _kinds(backbone: nn.Module, *, growing: bool = False) -> list[str]:
    """Return the class of every attention, or of those whose state grows; without attention, the backbone's class."""
    kinds = [m for m in backbone.modules() if isinstance(m, Attention) and not (growing and m.bounded_by is None)]
    return [type(m).__name__ for m in kinds] or [type(backbone).__name__]


# ------------------------------------------------------------------------------------------------------- the metadata


def _metadata(model: _Streamed, empty: State, batch_size: int, max_len: int | None) -> dict[str, Any]:
    """Return what a program needs to run the step of any task, as plain data. `max_len`: see `export`."""
    return {
        "version": lit_effattn.__version__,
        "task": type(model).__name__,
        "kinds": _kinds(model.backbone),
        "dtype": _name(next(model.parameters()).dtype),
        "batch_size": batch_size,
        "max_len": max_len,
        "state": [_described(name, t) for name, t in zip(state_names(empty), tensors(empty), strict=True)],
    }


def _metadata_of_task(model: _Streamed, features: StreamFeatures | None) -> dict[str, Any]:
    """Return what a program needs to run the step of this task. `features`: see `SpeechStep`."""
    if isinstance(model, SpeechRecognizer):
        factor = model.subsampling
        about = {
            "phones": list(model.phones),
            "n_mels": model.n_mels,
            "subsampling": factor,
            "look_ahead": model.look_ahead,
            "frame_seconds": round(factor * model.frame_seconds, 9),
        }
        if features is None:
            return about
        banks = features.filterbanks
        sound = {"sample_rate": banks.sample_rate, "frame": banks.frame_samples, "hop": banks.hop_samples}
        return about | {"sound": sound}
    about = {"n_levels": model.head.n_levels}
    if isinstance(model, PixelModel):
        return about | {"start": model.n_levels, "image_shape": list(model.image_shape)}
    if model.tokenizer is None:
        return about | {"start": None, "vocabulary": None}
    tokenizer = Tokenizer.from_spec(model.tokenizer)
    return about | {"start": tokenizer.start, "vocabulary": tokenizer.kind, "tokenizer": tokenizer.spec()}


def state_names(state: State, prefix: str = "state") -> list[str]:
    """Return the path of each tensor of a state, such as `state.layers.0.s`."""
    if isinstance(state, Tensor):
        return [prefix]
    if state is None:
        return []
    fields: Sequence[Any] = getattr(state, "_fields", range(len(state)))
    return [name for field, part in zip(fields, state, strict=True) for name in state_names(part, f"{prefix}.{field}")]


def _described(name: str, t: Tensor) -> dict[str, Any]:
    """Return the metadata of a tensor of the empty state, whose values are equal within each row."""
    first = (slice(None),) + (slice(1),) * (t.dim() - 1)
    rows = t[first]  # (B, 1, …, 1)
    if not torch.equal(t, rows.expand_as(t)):
        raise ValueError(f"{name} of the empty state differs within a row, which the metadata can't describe")
    fill = rows.tolist() if rows.unique().numel() > 1 else rows[0].item() if t.numel() else 0
    return {"name": name, "shape": list(t.shape), "dtype": _name(t.dtype), "fill": _as_json(fill)}


def _as_json(value: Any) -> Any:
    """Return numbers, in lists or not, with infinities as text, since JSON has no infinity."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value if np.isfinite(value) else str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --------------------------------------------------------------------------------------------------------- the formats

_Run = Callable[[tuple[Tensor, ...], list[Any]], tuple[Any, list[Any]]]
"""Maps the inputs of a step and the tensors of a state to log-probabilities and the tensors of the next state."""


def _write_onnx(step: Step, metadata: str, path: Path, *, prompts: bool) -> _Run:
    names = state_names(step.empty)
    program = torch.onnx.export(
        _program(step, prompts=prompts),
        dynamo=True,
        verbose=False,
        input_names=[*step.inputs, *names],
        output_names=["log_probs", *(f"next_{name}" for name in names)],
        optimize=False,
        custom_translation_table={
            torch.ops.aten.cos.default: _cos,
            torch.ops.aten.sort.stable: _stable_sort,
            torch.ops.aten.searchsorted.Tensor: _search_sorted,
            **(onnx_operators.translations() if prompts else {}),
        },
        opset_version=onnx_operators.REGISTERED if prompts else None,
    )
    assert program is not None
    _optimise(program.model)
    if prompts:
        onnx_operators.shorten(program.model)
        _optimise(program.model)
        onnx_operators.use_opset(program.model)
    program.model.metadata_props[METADATA] = metadata
    program.save(path)
    return _onnx_run(path, [*step.inputs, *names])


def _cos(x: Any) -> Any:
    """Translate torch.cos, in float64 by sin(x + π/2): onnxruntime 1.23, the last for Python 3.10, lacks it."""
    import onnx
    import onnxscript

    op: Any = onnxscript.opset18
    if x.dtype != onnx.TensorProto.DOUBLE:
        return op.Cos(x)
    quarter = onnx.helper.make_tensor("quarter", onnx.TensorProto.DOUBLE, [], [math.pi / 2])
    return op.Sin(op.Add(x, op.Constant(value=quarter)))


def _stable_sort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """Translate torch.sort with `stable`, which the converter does not support. TopK keeps equal values in order."""
    import onnxscript

    op: Any = onnxscript.opset18
    size = op.Constant(value_ints=[x.shape[dim]])
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


def _search_sorted(
    sorted_sequence: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """Translate torch.searchsorted, which the converter does not support: count the smaller (or equal) elements."""
    import onnxscript

    for name, given, remedy in (
        ("out_int32", out_int32, "convert the result"),
        ("side", side is not None, "give right=True or right=False"),
        ("sorter", sorter is not None, "sort the sequence before"),
    ):
        if given:
            raise NotImplementedError(f"torch.searchsorted with {name} is not supported; {remedy}, or use format=torch")
    op: Any = onnxscript.opset18
    last = op.Constant(value_ints=[-1])
    elements, values = op.Unsqueeze(sorted_sequence, op.Constant(value_ints=[-2])), op.Unsqueeze(x, last)
    before = op.LessOrEqual(elements, values) if right else op.Less(elements, values)
    return op.ReduceSum(op.Cast(before, to=7), last, keepdims=0)  # 7: int64


def _optimise(model: Any) -> None:
    """Fold constants, and remove repeated and unused computations.

    These passes preserve all values. Those of the exporter also drop an addition of a constant up to 10⁻⁸ and a
    multiplication by a constant within 10⁻⁵ of 1.
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

    def run(inputs: tuple[Tensor, ...], state: list[Any]) -> tuple[Any, list[Any]]:
        arrays = [t.numpy() if isinstance(t, Tensor) else t for t in (*inputs, *state)]
        log_probs, *after = session.run(None, dict(zip(names, arrays, strict=True)))
        return torch.from_numpy(log_probs), after

    return run


def _write_torch(step: Step, metadata: str, path: Path) -> _Run:
    with path.open("wb") as file:
        torch.export.save(_program(step), file, extra_files={METADATA: metadata})
    with path.open("rb") as written:
        loaded = torch.export.load(written).module()

    def run(inputs: tuple[Tensor, ...], state: list[Any]) -> tuple[Any, list[Any]]:
        log_probs, *after = loaded(*inputs, *state)
        return log_probs, after

    return run


def _program(step: Step, *, prompts: bool = False) -> torch.export.ExportedProgram:
    """Return the program. With `prompts` it reads any number of tokens, and keeps our operators."""
    inputs, state = tuple(step.inputs.values()), tuple(tensors(step.empty))
    with torch.no_grad():
        if not prompts:
            return torch.export.export(step, (*inputs, *state), strict=False)
        shapes: tuple[Any, ...] = ({1: torch.export.Dim("n_tokens")}, tuple({} for _ in state))
        with kept():  # of 2 tokens, since the sizes 0 and 1 are taken as fixed
            tokens = torch.cat([*inputs, *inputs], 1)
            return torch.export.export(step, (tokens, *state), dynamic_shapes=shapes, strict=False)


@contextmanager
def _conversion(step: Step, format: str) -> Iterator[None]:
    """Suppress the converters' warnings, which users can't act upon, and turn their errors into a ValueError."""
    try:
        with quiet():
            yield
        return
    except Exception as error:  # torch.export and the converters raise errors of many types
        reason = _reason(error)
    # Outside of the handler: an error's traceback would keep the tracer, and the classes that `export` collects.
    kinds = ", ".join(dict.fromkeys([type(step.entry).__name__, *_kinds(step.backbone)]))
    raise ValueError(f"a step of {kinds} can't be exported with format={format}: {reason}")


_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _reason(error: BaseException) -> str:
    """Return the first line of the original error, which names the missing function."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = _COLOUR.sub("", str(error)).strip()
    missing = re.match(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if missing is not None:
        return f"No ONNX function found for {missing[1]}"
    return text.partition("\n")[0] or type(error).__name__


# ------------------------------------------------------------------------------------------------------------- checked


def _checked(run: _Run, step: Step, n: int, *, prompts: bool = False) -> Exported:
    """Compare a file with the model on `n` random inputs in turn, each of the two with its own state.

    With `prompts` all inputs but the last are also read in one call, and the last in another.
    """
    if not n:
        return Exported(Path())
    exported_state: list[Any] = list(tensors(step.empty))
    state = map_tensors(torch.clone, step.empty)
    differences, seconds, seconds_here = [], [], []
    results: list[Tensor] = []  # the last two expected ones
    drawn = list(step.draw(n, torch.Generator().manual_seed(0)))

    def compare(log_probs: Tensor, expected: Tensor, where: str) -> None:
        for name, values in (("model", expected), ("exported step", log_probs)):
            if not values.isfinite().all():
                raise ValueError(f"the {name}'s log-probabilities after {where} are not finite; nothing was written")
        differences.append(largest_difference([log_probs], [expected]))
        if differences[-1] > EQUAL:
            raise ValueError(
                f"the exported step differs by {differences[-1]:.1e} from PyTorch's after {where}; nothing was written"
            )

    for i, inputs in enumerate(drawn):
        start = time.perf_counter()
        log_probs, exported_state = run(inputs, exported_state)
        middle = time.perf_counter()
        with torch.no_grad(), donated():
            expected, *after = step(*inputs, *tensors(state))
        seconds.append(middle - start)
        seconds_here.append(time.perf_counter() - middle)
        state = with_tensors(state, after)
        compare(log_probs, expected, f"{step.unit} {i}")
        results = [*results[-1:], expected]
    prompt_seconds = None
    if prompts and n > 1:
        prompt = torch.cat([tokens for (tokens,) in drawn[:-1]], 1)  # (B, n − 1)
        start = time.perf_counter()
        log_probs, exported_state = run((prompt,), list(tensors(step.empty)))
        prompt_seconds = time.perf_counter() - start
        compare(log_probs, results[0], f"a prompt of {n - 1} tokens")
        compare(run(drawn[-1], exported_state)[0], results[1], f"a token after a prompt of {n - 1} tokens")
    return Exported(Path(), step.unit, n, largest(differences), median(seconds), median(seconds_here), prompt_seconds)
