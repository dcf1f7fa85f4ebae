"""What linear attention costs beside softmax attention, measured in the same run: `python -m benchmarks`."""
