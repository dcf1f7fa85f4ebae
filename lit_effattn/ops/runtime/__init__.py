"""Selection, compilation and registration of kernels."""
