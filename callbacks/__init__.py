"""What happens around training, as Lightning callbacks. They know a model by what it can do, never by its class."""

from callbacks.checkpoints import LastCheckpoint
from callbacks.compile import Compile
from callbacks.feature_redraw import FeatureRedraw
from callbacks.memory_carry import MemoryCarry
from callbacks.progress import ProgressBar
from callbacks.random_states import RandomStates
from callbacks.sample_grid import SampleGrid
from callbacks.stop_on_signal import StopOnSignal, Stopped

__all__ = [
    "Compile",
    "FeatureRedraw",
    "LastCheckpoint",
    "MemoryCarry",
    "ProgressBar",
    "RandomStates",
    "SampleGrid",
    "StopOnSignal",
    "Stopped",
]
