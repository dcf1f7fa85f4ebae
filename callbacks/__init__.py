"""Lightning callbacks. They check a model's methods and attributes, not its class."""

from lit_effattn.callbacks.check_finite import CheckFinite, NotFiniteError
from lit_effattn.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from lit_effattn.callbacks.clip_each_parameter import ClipEachParameter
from lit_effattn.callbacks.compile import Compile
from lit_effattn.callbacks.cost_log import CostLog
from lit_effattn.callbacks.feature_redraw import FeatureRedraw
from lit_effattn.callbacks.global_loss_normalization import GlobalLossNormalization
from lit_effattn.callbacks.memory_carry import MemoryCarry
from lit_effattn.callbacks.progress import ParameterSummary, ProgressBar
from lit_effattn.callbacks.random_states import RandomStates
from lit_effattn.callbacks.sample_grid import SampleGrid
from lit_effattn.callbacks.stop_on_signal import StopOnSignal
from lit_effattn.stopping import Stopped

__all__ = [
    "BestCheckpoint",
    "CheckFinite",
    "ClipEachParameter",
    "Compile",
    "CostLog",
    "FeatureRedraw",
    "GlobalLossNormalization",
    "LastCheckpoint",
    "MemoryCarry",
    "NotFiniteError",
    "ParameterSummary",
    "ProgressBar",
    "RandomStates",
    "SampleGrid",
    "StopOnSignal",
    "Stopped",
]
