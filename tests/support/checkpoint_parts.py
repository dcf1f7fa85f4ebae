"""A checkpoint divided into parts by the definition of the format, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path


def divide(checkpoint: dict[str, Any], folder: Path, n: int, own: dict[str, list[Any]] | None = None) -> Path:
    """Write a checkpoint as `n` processes do; of `own`, each has its item. Parameters and their states are divided."""
    rows: list[dict[str, Tensor]] = [{} for _ in range(n)]

    def take(path: Any, leaf: Any) -> Any:
        name = keystr(path)
        if (
            not name.startswith(("['state_dict']", "['optimizer_states']"))
            or not isinstance(leaf, Tensor)
            or not leaf.ndim
        ):
            return leaf
        chunks = leaf.chunk(n)  # as torch's Shard(0) divides
        for rank in range(n):
            rows[rank][name] = (chunks[rank] if rank < len(chunks) else leaf[:0]).clone()
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    folder.mkdir()
    common, own = tree_map_with_path(take, checkpoint), own or {}
    for rank in range(n):
        mine = {name: values[rank] for name, values in own.items()}
        torch.save({"rows": rows[rank], "own": mine, "token": "t"}, folder / f"part_{rank:05d}.pt")
    sizes = [(folder / f"part_{rank:05d}.pt").stat().st_size for rank in range(n)]
    about = {"format": 1, "token": "t", "bytes": sizes, "own": [*own]}
    torch.save({**common, "parts": about}, folder / "common.pt")
    return folder
