"""Linear recurrences with decay and the delta rule: the forms in PyTorch, and the kernels."""
