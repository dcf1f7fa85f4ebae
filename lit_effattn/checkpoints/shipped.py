"""The trained models that come with the package, by their names: `model:digits`. Does not import PyTorch."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

PREFIX = "model:"  # what the name of a shipped model begins with, where a checkpoint is expected
METADATA = "lit_effattn"  # name of the metadata of an exported file, which are JSON

FOLDER = Path(__file__).resolve().parent.parent / "models"
SUFFIX = ".safetensors"


def models() -> dict[str, Path]:
    """Return the files of the shipped models by their names."""
    return {path.stem: path for path in sorted(FOLDER.glob(f"*{SUFFIX}"))}


def is_model(name: str | Path) -> bool:
    """Return whether a checkpoint's name is `model:` and a name."""
    return str(name).startswith(PREFIX)


def model_path(name: str | Path, option: str = "--ckpt_path") -> Path:
    """Return the file that a checkpoint's name means: the shipped model's of `model:NAME`, else the path `name`.

    Raises:
        FileNotFoundError: If there is no shipped model of that name. The message names those that there are.
    """
    if not is_model(name):
        return Path(name)
    known, stem = models(), str(name).removeprefix(PREFIX)
    if stem not in known:
        close = get_close_matches(stem, known, n=1)
        hint = f"did you mean {PREFIX}{close[0]}? " if close else ""
        raise FileNotFoundError(f"{option} {name}: there is no such model; {hint}there are {', '.join(known)}")
    return known[stem]


def model_name(path: str | Path) -> str | None:
    """Return the name of the shipped model whose file is `path`; None if it is another file."""
    path = Path(path)
    return path.stem if path.suffix == SUFFIX and path.resolve().parent == FOLDER else None


def model_config(path: str | Path) -> str | None:
    """Return the text of the configuration of the shipped model whose weights are in `path`; None for other files."""
    return Path(path).with_suffix(".yaml").read_text(encoding="utf-8") if model_name(path) is not None else None


def metadata(path: Path) -> dict[str, Any]:
    """Return what a safetensors file that `export` wrote says of its model, without reading the weights.

    Raises:
        ValueError: If it is damaged, or another program wrote it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "null"))
    except (SafetensorError, RecursionError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged or not in the safetensors format: {reason}") from error
    model = about.get("model") if isinstance(about, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("class_path"), str):
        raise ValueError(f"{path} does not describe its model: write it by `lit-effattn export --format safetensors`")
    return dict(about)
