"""Preventing downloads of data sets that only a checkpoint names: Hugging Face's libraries use their cache alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

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
    init_args = data.setdefault("init_args", {}) if isinstance(data, dict) else {}
    if init_args.get("dataset") in _DOWNLOADED and not (user.given("data.download") or user.given("data.dataset")):
        init_args["download"] = False
    from_hub = "huggingface" in (init_args.get("source"), init_args.get("corpus")) and not user.given("data.path")
    if from_hub:
        rank_zero_info("Only Hugging Face's cache is read; to allow a download, give --data.path yourself")
    return from_hub


@contextmanager
def offline(enabled: bool) -> Iterator[None]:
    """Restrict Hugging Face's libraries to their cache, if `enabled`, and restore the environment at the end."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(dict.fromkeys(OFFLINE, "1") if enabled else {})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
