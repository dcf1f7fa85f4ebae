"""Text: streams of tokens, tokenizers, dialogues."""
