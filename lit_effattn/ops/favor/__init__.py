"""FAVOR+, Performer's attention: the forms in PyTorch, when kernels are used, and these, in C++ and in Triton."""
