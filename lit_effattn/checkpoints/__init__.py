"""Checkpoints: files, folders, averages, runs, and what a checkpoint may name."""
