"""The configuration of a command, from flags, files and a checkpoint."""
