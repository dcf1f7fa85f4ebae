"""Linear attention: the forms in PyTorch, the dispatch to kernels, and the kernels in C++ and Triton."""
