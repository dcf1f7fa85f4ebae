"""The laws that modules with a state keep, for any module: split streams, padding, batches, caches, gradients.

    report = check(functools.partial(MyAttention, 64, 4))
    print(report)

Needs PyTorch alone. `docs/laws.md` describes the laws and how to write an adapter.
"""

from lit_effattn.laws.adapter import Adapter
from lit_effattn.laws.adapters.contract import ContractAdapter
from lit_effattn.laws.adapters.function import FunctionAdapter
from lit_effattn.laws.adapters.hugging_face import HuggingFaceAdapter
from lit_effattn.laws.adapters.recurrent import RecurrentAdapter
from lit_effattn.laws.checking import check
from lit_effattn.laws.registry import LAWS
from lit_effattn.laws.report import BrokenLawError, Report, Result
from lit_effattn.laws.suite import LawSuite

__all__ = [
    "LAWS",
    "Adapter",
    "BrokenLawError",
    "ContractAdapter",
    "FunctionAdapter",
    "HuggingFaceAdapter",
    "LawSuite",
    "RecurrentAdapter",
    "Report",
    "Result",
    "check",
]
