"""Synthetic tasks: sequences that are drawn, not read."""
