"""Synthetic tasks: sequences that are drawn, not read."""

from lit_effattn.datamodules.synthetic.base import SyntheticTask

__all__ = ["SyntheticTask"]
