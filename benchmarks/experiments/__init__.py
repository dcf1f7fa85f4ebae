"""Experiments that show what trained or untrained models can do, not what they cost: `python -m benchmarks NAME`."""
