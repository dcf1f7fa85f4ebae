"""Linear attention: the plain form, and the kernels in C++ and Triton."""
