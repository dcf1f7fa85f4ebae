"""Pretrained models: folders of Hugging Face weights to checkpoints, and back."""

from lit_effattn.pretrained.convert import convert

__all__ = ["convert"]
