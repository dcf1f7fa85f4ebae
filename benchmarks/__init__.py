"""What linear attention costs beside softmax attention, measured side by side in the same run: `python -m benchmarks`."""
