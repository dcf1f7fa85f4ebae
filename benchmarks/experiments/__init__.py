"""Experiments on the quality of models, not on their cost: `python -m benchmarks NAME`."""
