"""Checkpoints: files, folders, averages, runs, and the classes that a checkpoint may name."""
