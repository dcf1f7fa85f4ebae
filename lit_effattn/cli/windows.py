"""Windows for attention whose state would grow without bound, in runs that carry a memory.

A run of Transformer-XL states how far its memory reaches. If a flag replaces its attention by one with a `window`, the
window is what the last position of a segment sees there: the memory and the segment.
"""

from __future__ import annotations

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.callbacks import MemoryCarry


def stated_mem_len(settings: Any) -> int | None:
    """Return the last `mem_len` in nested settings, as files and flags give them; None: there is none."""
    found = None
    for name, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        if name == "mem_len" and type(value) is int:
            found = value
        elif isinstance(value, (dict, list)):
            inner = stated_mem_len(value)
            found = found if inner is None else inner
    return found


def set_windows(config: Namespace, mem_len: int | None) -> None:
    """Set each `window` that is null to memory length + segment length, if the run carries a memory of known length.

    Args:
        config: The parsed settings of a run, which are changed.
        mem_len: The memory length that its files state.
    """
    carries = any(str(c.get("class_path")).endswith(MemoryCarry.__name__) for c in _specs(config.trainer.callbacks))
    segment_len = config.get("data.init_args.segment_len")
    if not carries or mem_len is None or not isinstance(segment_len, int):
        return
    for kind in _specs(config.get("model.init_args.backbone.init_args.attention")):
        if kind.get("init_args.window", False) is not None:
            continue
        kind.init_args.window = window = mem_len + segment_len
        name = kind.class_path.rpartition(".")[2]
        rank_zero_info(f"{name}: window={window}, the memory's {mem_len} positions and the segment's {segment_len}")


def _specs(value: Any) -> list[Namespace]:
    """Return the specs in one or a list of them."""
    return [spec for spec in (value if isinstance(value, list) else [value]) if isinstance(spec, Namespace)]
