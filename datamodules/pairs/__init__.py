"""Pairs of sequences, and labelled texts."""
