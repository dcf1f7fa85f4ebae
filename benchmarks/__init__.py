"""Time and memory of efficient attention compared with softmax attention in the same run: `python -m benchmarks`."""
