"""Records of runs, and the commands compare, sweep and report."""
