"""Text: streams of tokens, tokenizers, dialogues."""

from lit_effattn.datamodules.text.text_stream import TextStream

__all__ = ["TextStream"]
