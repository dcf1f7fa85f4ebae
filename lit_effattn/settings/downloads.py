"""Preventing downloads of data sets, and writing to folders, that only a checkpoint names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_effattn.checkpoints.allowlist import NotAllowedError
from lit_effattn.settings.arguments import Settings

_DOWNLOADED = ("mnist", "fashion_mnist", "cifar10")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that restrict Hugging Face's libraries to their cache."""


def forbid_downloads(data: Any, user: Settings) -> bool:
    """Disable downloads of data that only a checkpoint names.

    Args:
        data: The settings of the data in a checkpoint, which are changed.
        user: The settings that the user gives.

    Returns:
        Whether Hugging Face's libraries must use their cache alone.
    """
    data = data if isinstance(data, dict) else {}
    init_args = data["init_args"] = {**(data.get("init_args") or {}), **(data.pop("dict_kwargs", None) or {})}
    if init_args.get("dataset") in _DOWNLOADED and not (user.given("data.download") or user.given("data.dataset")):
        init_args["download"] = False
    from_hub = "huggingface" in (init_args.get("source"), init_args.get("corpus")) and not user.given("data.path")
    if from_hub:
        rank_zero_info("Only Hugging Face's cache is read; to allow a download, give --data.path yourself")
    return from_hub


def forbid_folders(data: Any, user: Settings, source: str) -> None:
    """Prevent that data are prepared in a folder, outside the current one, that only a checkpoint names.

    Args:
        data: The settings of the data in a checkpoint, from which the folder of a cache is removed.
        user: The settings that the user gives.
        source: The checkpoint, for messages.

    Raises:
        NotAllowedError: If a corpus would be made in such a folder.
    """
    init_args = data["init_args"]
    for name in ("cache", "cache_dir"):
        if _is_outside(init_args.get(name)) and not user.given(f"data.{name}"):
            folder = init_args.pop(name)
            rank_zero_info(f"data.{name} {folder!r} is not used; give --data.{name} yourself to write there")
    corpus = init_args.get("corpus")
    if not isinstance(corpus, dict) or not str(corpus.get("class_path")).endswith("EspeakCorpus"):
        return
    root = {**(corpus.get("init_args") or {}), **(corpus.get("dict_kwargs") or {})}.get("root")
    is_made = isinstance(root, str) and Path(root).is_dir() and any(Path(root).iterdir())
    if _is_outside(root) and not is_made and not (user.given("data.corpus") or user.given("data.corpus.root")):
        raise NotAllowedError(f"{source} makes its data in {root}: to allow it, give --data.corpus.root {root}")


def _is_outside(folder: Any) -> bool:
    return isinstance(folder, str) and not Path(folder).resolve().is_relative_to(Path.cwd().resolve())


@contextmanager
def offline(enabled: bool) -> Iterator[None]:
    """Restrict Hugging Face's libraries to their cache, if `enabled`, and restore their settings at the end."""
    with ExitStack() as settings:
        if enabled:
            settings.enter_context(patch.dict(os.environ, dict.fromkeys(OFFLINE, "1")))
            for module in ("huggingface_hub.constants", "datasets.config"):  # which read the environment once
                for name in OFFLINE:
                    if hasattr(sys.modules.get(module), name):
                        settings.enter_context(patch.object(sys.modules[module], name, True))
        yield
