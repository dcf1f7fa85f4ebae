import sys
from pathlib import Path

# `python -m benchmarks` finds the package in the working directory; it is not installed, and pytest adds no directory.
sys.path.insert(0, str(Path(__file__).parents[2]))
