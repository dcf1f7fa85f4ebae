"""Which parameters have weight decay, and Muon for the matrices of hidden layers, with AdamW for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import AdamW, Muon, Optimizer

from lit_effattn import registry
from lit_effattn.checks import at_least, probabilities
from lit_effattn.sequence import SequenceModule

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for the other parameters, as one optimiser with one state.

        B ← μ B + (1 − μ) G,  W ← (1 − η λ) W − η' NS(μ B + (1 − μ) G)             Jordan et al. 2024

    NS, five Newton–Schulz steps in bfloat16, moves the singular values of its matrix near to 1. The rate is
    η' = 0.2 η √max(rows, columns) (Liu et al. 2025, equation 4): an update then has the root mean square of AdamW's,
    and both take one rate. `torch.optim.Muon` and `torch.optim.AdamW` compute the steps.

    In a task, Muon updates the matrices of hidden layers: the weights of `nn.Linear` and of recurrent layers
    (`weight_ih`, `weight_hh`) inside a backbone, encoder or decoder. Token embeddings, front ends, heads and output
    layers, biases, norms, convolutions, learned positions, and the vectors of relative positions are AdamW's. In code
    of your own, Muon updates all parameters of two dimensions until `use_muon_for` is called.

    Its parameter groups are Muon's, then AdamW's; a schedule changes the rates of all.

    Args:
        params: The parameters. Groups with options of their own are not supported.
        lr: Learning rate η of both.
        weight_decay: Weight decay λ of both, decoupled.
        momentum: μ of Muon.
        nesterov: Whether Muon steps along μ B + (1 − μ) G; if not, along B.
        ns_steps: Number of Newton–Schulz steps.
        adjust_lr_fn: "match_rms_adamw": η' as above. "original": η' = η √max(1, rows / columns), whose best rates are
            about 0.02; set `adamw_lr`, too.
        adamw_lr: Learning rate of AdamW. Default: `lr`.
        betas: Decay of AdamW's averages of the gradient and of its square.
        eps: Added to the root in AdamW.

    Raises:
        ValueError: If there is no matrix, or an argument is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        at_least(0, lr=lr, weight_decay=weight_decay, adamw_lr=adamw_lr, eps=eps)
        probabilities(momentum=momentum)
        at_least(1, ns_steps=ns_steps)
        params = list(params)
        if not all(isinstance(p, Tensor) for p in params):
            raise ValueError("params of MuonWithAdamW must be tensors; groups and names are not supported")
        matrices = [p for p in params if p.ndim == 2]
        rest = [p for p in params if p.ndim != 2]
        _check_some(matrices)
        self._parts: tuple[Optimizer, Optimizer] = (
            Muon(
                matrices,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            ),
            AdamW(
                [{"params": rest}],  # may be empty
                lr=lr if adamw_lr is None else adamw_lr,
                betas=(betas[0], betas[1]),
                eps=eps,
                weight_decay=weight_decay,
            ),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.defaults = {name: value for part in self._parts for name, value in part.defaults.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, with the copies of Muon and AdamW."""
        return {**super().__getstate__(), "_parts": self._parts}

    @property
    def parts(self) -> tuple[Optimizer, Optimizer]:
        """Muon and AdamW, with their groups and the state of this optimiser."""
        for part, is_muon in zip(self._parts, (True, False), strict=True):
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) is is_muon]
            part.state = self.state
        return self._parts

    def use_muon_for(self, matrices: Iterable[Tensor]) -> None:
        """Use Muon for these matrices alone. Call it before the first step and before a schedule is made.

        Raises:
            ValueError: If none of them is one of the optimiser's matrices.
        """
        wanted = {id(p) for p in matrices}
        of_muon, of_adamw = (group["params"] for group in self.param_groups[:2])
        _check_some([p for p in of_muon if id(p) in wanted])
        of_adamw += [p for p in of_muon if id(p) not in wanted]
        of_muon[:] = [p for p in of_muon if id(p) in wanted]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters, and return what `closure`, which computes the gradients, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def _check_some(matrices: list[Tensor]) -> None:
    if not matrices:
        raise ValueError(
            "MuonWithAdamW: the model has no matrices in hidden layers for Muon (FSDP flattens them); "
            "use torch.optim.AdamW"
        )


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the hidden layers of a model: see `MuonWithAdamW`."""
    layers = {m for module in model.modules() if isinstance(module, SequenceModule) for m in module.modules()}
    return [
        parameter
        for module in model.modules()
        if module in layers
        for name, parameter in module.named_parameters(recurse=False)
        if (isinstance(module, nn.Linear) or name.startswith(("weight_ih", "weight_hh"))) and parameter.ndim == 2
    ]


def without_decay(model: nn.Module, *, decay_biases_and_gains: bool = True) -> list[nn.Parameter]:
    """Return the parameters without weight decay.

    They are those that a module names in its class attribute `no_weight_decay`, and without `decay_biases_and_gains`
    also all biases and the gains of norms.

    Raises:
        ValueError: If a module names what is not one of its parameters.
    """
    exempt: list[nn.Parameter] = []
    for path, module in model.named_modules():
        in_list = path.rpartition(".")[2] if isinstance(module, nn.ParameterList) else None
        own = dict(module.named_parameters(recurse=False))
        named = getattr(module, "no_weight_decay", ())
        if isinstance(named, str) or not set(named) <= own.keys():
            raise ValueError(
                f"{type(module).__name__}.no_weight_decay={named!r} must be a tuple of names of its parameters, which "
                f"are {', '.join(own) or 'none'}"
            )
        exempt += [
            parameter
            for name, parameter in own.items()
            if name in named or (not decay_biases_and_gains and _is_bias_or_gain(module, in_list or name))
        ]
    return exempt


def _is_bias_or_gain(module: nn.Module, name: str) -> bool:
    # By name, not by the number of dimensions: FSDP flattens parameters. u and v: the biases of Transformer-XL.
    return isinstance(module, _NORMS) or name.startswith("bias") or name in ("gain", "u", "v")


def exempt_from_decay(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Move `parameters` from the groups with a `weight_decay` to further groups, where it is 0.

    Call it before the first step and before a schedule is made.
    """
    wanted = {id(p) for p in parameters}
    for group in [group for group in optimizer.param_groups if group.get("weight_decay")]:
        exempt = [p for p in group["params"] if id(p) in wanted]
        if exempt:
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.param_groups.append({**group, "params": exempt, "weight_decay": 0.0})


_OF_TORCH = (kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer))
registry.enter(MuonWithAdamW, *_OF_TORCH)
