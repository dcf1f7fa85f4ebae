"""How Triton's kernels are compiled for compute capability 9.0 where there is no GPU."""

FOR_9_0 = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget

class Driver:  # what Triton asks of a GPU before it launches
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

triton.runtime.driver.set_active(Driver())
run = triton.JITFunction.run

def compiled(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    print(dtype, width, self.fn.__name__, kernel.metadata.shared, flush=True)

triton.JITFunction.run = compiled
"""
"""What a process runs first: kernels are then compiled, not run, and each prints a line, its shared memory last."""

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have."""
