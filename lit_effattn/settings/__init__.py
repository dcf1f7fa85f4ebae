"""Flags, files and a checkpoint become one configuration."""
