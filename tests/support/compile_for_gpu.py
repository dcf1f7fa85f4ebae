"""How Triton's kernels are compiled for a GPU where there is none."""

COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget

capability = int(sys.argv.pop(1))
shared = {80: 164, 86: 100, 90: 228}[capability]

class Driver:  # what Triton asks of a GPU before it launches
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

triton.runtime.driver.set_active(Driver())
run = triton.JITFunction.run

def compiled(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    print(dtype, width, self.fn.__name__, kernel.metadata.shared, flush=True)

triton.JITFunction.run = compiled
"""
"""What a process runs first, with the compute capability times 10 as its first argument.

Kernels are then compiled, not run, and each prints a line, its shared memory last.
"""

MOST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability."""
