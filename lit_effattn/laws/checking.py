"""`check`: all laws for one module."""

import inspect
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from lit_effattn.laws.adapter import Adapter, Build
from lit_effattn.laws.adapters.contract import ContractAdapter
from lit_effattn.laws.adapters.recurrent import RecurrentAdapter
from lit_effattn.laws.law import Failure, Law, run
from lit_effattn.laws.registry import BITWISE, LAWS, chosen
from lit_effattn.laws.report import Report, Result
from lit_effattn.laws.shrink import SECONDS, shrink
from lit_effattn.laws.subject import Subject


def check(
    module: nn.Module | Build | Adapter,
    *,
    laws: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    bitwise: bool = False,
    shrink_seconds: float = SECONDS,
) -> Report:
    """Check the laws for a module.

    Args:
        module: An adapter; or a module, or a function without arguments that builds one, with a built-in adapter: a
            module with `initial_state` and the call `y, state = module(x, state, lengths)`, or a recurrent module of
            PyTorch.
        laws: Names of laws. Default: all, without `bitwise`.
        device: Where to compute.
        dtype: The type of parameters and inputs. Default: the adapter's, float64.
        bitwise: Demand results that are equal to the bit. Default of `laws`: those of `BITWISE`.
        shrink_seconds: The time to make one failing case smaller, at most; 0: not at all.

    Returns:
        The report. `report.raise_if_broken()` raises an exception of one line.

    Raises:
        ValueError: If there is no law of a name, no built-in adapter fits, or another argument is invalid; or
            if `Adapter.bitwise` names no law.

    Examples:
        >>> from functools import partial
        >>> from lit_effattn.laws import check
        >>> report = check(partial(torch.nn.GRU, 8, 8, batch_first=True), laws=["steps", "padding"])
        >>> report.ok, [result.status for result in report.results]
        (True, ['ok', 'ok'])
    """
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        adapter = adapter_for(module)
        if bitwise and laws is None:
            laws = BITWISE
        if unknown := adapter.bitwise - LAWS.keys():
            raise ValueError(f"{adapter.name}: bitwise={sorted(unknown)} are not laws; there are {', '.join(LAWS)}")
        subject = Subject(adapter, device, dtype, bitwise)
        torch.manual_seed(0)
        results = [_result(law, subject, shrink_seconds) for law in chosen(laws)]
    return Report(adapter.name, results, str(subject.device), str(subject.dtype))


def adapter_for(module: nn.Module | Build | Adapter) -> Adapter:
    """Return `module` if it is an adapter, else the built-in adapter for it.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(module, Adapter):
        return module
    if not callable(module):
        raise ValueError(f"module={module!r} must be a module, a function that builds one, or an Adapter")
    made = module if isinstance(module, nn.Module) else module()
    if isinstance(made, nn.RNNBase):
        return RecurrentAdapter(module)
    if hasattr(made, "initial_state") and "lengths" in inspect.signature(getattr(made, "forward", made)).parameters:
        return ContractAdapter(module)
    raise ValueError(
        f"module is a {type(made).__name__}, for which there is no built-in adapter; write one: a subclass of "
        "lit_effattn.laws.Adapter whose `call` returns outputs and state"
    )


def _result(law: Law, subject: Subject, shrink_seconds: float) -> Result:
    start = time.monotonic()
    if reason := law.missing(subject):
        return Result(law.name, law.title, "not checked", reason=reason)
    failure: Failure | None = None
    for variant in law.variants(subject):
        if (failure := run(law, subject, variant)) is not None:
            break
    if failure is None:
        return Result(law.name, law.title, "ok", law.tolerance(subject), time.monotonic() - start)
    result = failed(failure, subject, shrink_seconds)
    return replace(result, seconds=time.monotonic() - start)


def failed(failure: Failure, subject: Subject, shrink_seconds: float) -> Result:
    """Return the result of a broken law, with the smallest failing case that is found in so many seconds."""
    law, tolerance, smallest = failure.law, failure.law.tolerance(subject), subject
    if shrink_seconds > 0:
        smallest, failure = shrink(subject, failure, shrink_seconds)
    return Result(
        law.name,
        law.title,
        "broken" if failure.difference.error is None else "error",
        tolerance,
        detail=law.detail,
        case=str(failure.trial),
        inputs="; ".join(failure.inputs),
        difference=str(failure.difference),
        module=smallest.adapter.name if smallest is not subject else "",
    )
