"""Options of attention that follow from the run and the data, and options that a replaced attention leaves behind.

A flag may give any run another kind of attention. Its window follows from the length of the run's memory, its stride
from the length of the sequences. A file may also have settings that only its own attention uses, and which are left
out for another. Changes are printed, and saved with the other settings.
"""

import math
from collections.abc import Callable
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.attention import SparseAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.checkpoints.trust import find
from lit_effattn.settings.arguments import Arguments, Settings

_ATTENTION = "model.backbone.attention"
_OF_EVALUATION = ("eval_mem_len", "eval_clamp_len", "eval_same_length")
"""Options of a `LanguageModel` that concern the memory of its attention."""


def set_windows(config: Namespace, arguments: Arguments) -> None:
    """Set each `window` that is null to memory length + segment length, if the run carries a memory of known length.

    The file of a Transformer-XL states `mem_len`, the length of its memory. If a flag replaces its attention with one
    that has a `window`, the window is the context of the last position of a segment: the memory and the segment.
    """
    lengths = [length for file in arguments.files for length in file.values(f"{_ATTENTION}.mem_len")]
    mem_len = next((length for length in reversed(lengths) if type(length) is int), None)
    carries = any(_is_a(callback, MemoryCarry) for callback in _specs(config.trainer.callbacks))
    segment_len = config.get("data.init_args.segment_len")
    if not carries or mem_len is None or not isinstance(segment_len, int):
        return
    for kind in _attentions(config):
        if kind.get("init_args.window", False) is not None:
            continue
        kind.init_args.window = window = mem_len + segment_len
        name = kind.class_path.rpartition(".")[2]
        rank_zero_info(f"{name}: window={window}, the memory's {mem_len} positions and the segment's {segment_len}")


def set_strides(config: Namespace, arguments: Arguments, data: Callable[[], Any], *, resumes: bool) -> None:
    """Set each `stride` to a row of the images, or to √N for sequences of a known length N.

    A stride from the user is kept, and with `resumes` that of a checkpoint, unless the user names another attention.
    """
    kinds = [kind for kind in _attentions(config) if _is_a(kind, SparseAttention)]
    named = {kind.class_path.rpartition(".")[2] for kind in kinds}
    new = not resumes or any(name in named for name in arguments.stated.classes(_ATTENTION))
    if not kinds or not new or arguments.stated.values(f"{_ATTENTION}.stride"):
        return
    module = data()
    lengths = (getattr(module, name, None) for name in ("segment_len", "max_len", "length"))
    length = next((n for n in lengths if isinstance(n, int)), None)
    if shape := getattr(module, "image_shape", None):
        stride, reason = shape[1] * shape[2], "a row of the images"
    elif length is not None:
        stride, reason = max(1, round(math.sqrt(length))), f"√N for sequences of N={length}"
    else:
        return
    for kind in kinds:
        kind.init_args.stride = stride
    rank_zero_info(f"{SparseAttention.__name__}: stride={stride}, {reason}")


def leave_out(config: Namespace, arguments: Arguments) -> None:
    """Leave out the options of the evaluation memory that files state for another attention than the run's.

    The options in a file are for its attention, or else that of the files before. Options from flags are kept, so that
    a mistake in them is an error.
    """
    kinds: list[str] = []
    stated_for: dict[str, list[str]] = {}
    for file in arguments.files:
        kinds = _kinds(file) or kinds
        stated_for |= {name: kinds for name in _OF_EVALUATION if file.text(f"model.{name}") is not None}
    now = {*_kinds(Settings([("model", config.model.as_dict())]))}
    for name, owners in stated_for.items():
        if owners and not now <= {*owners} and not arguments.flags.given(f"model.{name}"):
            rank_zero_info(f"left out, being for {', '.join(owners)}: {name}={config.model.init_args[name]}")
            config.model.init_args[name] = None


def _kinds(settings: Settings) -> list[str]:
    """Return the bare names of the attention kinds in a model."""
    named = (names for path, names in settings.named() if path.startswith("model.") and path.endswith(".attention"))
    return [name for names in named for name in names]


def _is_a(spec: Namespace, kind: type) -> bool:
    """Return whether a parsed spec is of a class or a subclass of it."""
    return issubclass(find(spec.class_path), kind)


def _attentions(config: Namespace) -> list[Namespace]:
    return _specs(config.get("model.init_args.backbone.init_args.attention"))  # `_ATTENTION` in parsed settings


def _specs(value: Any) -> list[Namespace]:
    """Return the specs in a spec or a list of specs."""
    return [spec for spec in (value if isinstance(value, list) else [value]) if isinstance(spec, Namespace)]
