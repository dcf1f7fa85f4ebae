"""The shipped configurations: finding, listing and showing them. Does not import PyTorch, which is slow."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

_ATTENTION = "--model.backbone.attention"
REMOVED = {
    "copy_lsh1": f"copy_lsh4 {_ATTENTION}.n_hashes 1",
    "copy_performer": f"copy_linear {_ATTENTION} PerformerAttention {_ATTENTION}.chunk_size 64",
    "copy_softmax": f"copy_linear {_ATTENTION} SoftmaxAttention",
    "copy_sparse": f"copy_linear {_ATTENTION} SparseAttention {_ATTENTION}.stride 8",
    "digits_lsh": f"digits_softmax {_ATTENTION} LSHAttention"
    f" {_ATTENTION}.n_hashes 2 {_ATTENTION}.n_buckets 4 {_ATTENTION}.chunk_size 8",
    "digits_shaw": f"digits_softmax {_ATTENTION} ShawAttention",
    "digits_sparse": f"digits_softmax {_ATTENTION} SparseAttention",
    "espeak_lsh": f"espeak_linear {_ATTENTION} LSHAttention"
    f" {_ATTENTION}.n_hashes 2 {_ATTENTION}.n_buckets 8 {_ATTENTION}.chunk_size 32",
    "espeak_softmax": f"espeak_linear {_ATTENTION} SoftmaxAttention",
    "fashion_softmax": f"fashion_linear {_ATTENTION} SoftmaxAttention",
    "librispeech_softmax": f"librispeech_linear {_ATTENTION} SoftmaxAttention",
    "mnist_softmax": f"mnist_linear {_ATTENTION} SoftmaxAttention",
    "timit_softmax": f"timit_linear {_ATTENTION} SoftmaxAttention",
    "wsj_lsh": f"wsj_linear {_ATTENTION} LSHAttention {_ATTENTION}.n_buckets 32 {_ATTENTION}.chunk_size 32",
    "wsj_softmax": f"wsj_linear {_ATTENTION} SoftmaxAttention",
}
"""Configurations that were shipped once, and the `--config` with flags that gives their settings in another folder."""


def shipped() -> dict[str, Path]:
    """Return the files of the shipped configurations by their names."""
    return {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))}


def find_config(name: str) -> str:
    """Return the file that `--config name` means: the user's own, or else the shipped configuration of that name.

    Raises:
        ValueError: If there is neither. The message for a configuration in `REMOVED` names its replacement.
    """
    stem = name.removeprefix("configs/").removesuffix(".yaml")
    for own in (Path(name), Path(f"{name}.yaml"), Path("configs", f"{stem}.yaml")):
        if own.is_file():
            return str(own)
    known = shipped()
    if stem in known:
        return str(known[stem])
    if stem in REMOVED:
        raise ValueError(
            f"--config {name} is not shipped any more: use --config {REMOVED[stem]}; "
            f"for its older runs, add --name {stem}"
        )
    close = get_close_matches(stem, known, n=1)
    problem = "this is a folder, not a file" if Path(name).is_dir() else "there is no such file"
    raise ValueError(
        f"--config {name}: {problem}, nor a shipped configuration of that name"
        + (f"; did you mean {close[0]}?" if close else "; `lit-effattn configs` lists those")
    )


def configs(names: list[str]) -> str:
    """Return the output of `lit-effattn configs`: a line for each shipped configuration, or the text of the named ones.

    Raises:
        ValueError: If there is no configuration of a name.
    """
    if names:
        return "\n".join(Path(find_config(name)).read_text(encoding="utf-8").rstrip() for name in names)
    files = shipped()
    width = max(map(len, files))
    return "\n".join(f"{name:{width}}  {_about(path.read_text(encoding='utf-8'))}" for name, path in files.items())


def _about(text: str) -> str:
    """Return the first sentence of the comment at the head of a configuration."""
    comment = re.match(r"(#.*\n)*", text)
    words = " ".join((comment[0] if comment else "").replace("#", " ").split())
    return re.split(r"(?<! al)\. ", words)[0].removesuffix(".")
