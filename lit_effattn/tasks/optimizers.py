"""Muon for the matrices of hidden layers, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from lit_effattn.checks import at_least, probabilities
from lit_effattn.sequence import SequenceModule


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for the other parameters, as one optimiser with one state.

        B ← μ B + (1 − μ) G,  W ← (1 − η λ) W − η' NS(μ B + (1 − μ) G)             Jordan et al. 2024

    NS, five Newton–Schulz steps in bfloat16, moves the singular values of its matrix near to 1. The rate is
    η' = 0.2 η √max(rows, columns) (Liu et al. 2025, equation 4): an update then has the root mean square of AdamW's,
    and both take one rate. `torch.optim.Muon` and `torch.optim.AdamW` compute the steps.

    In a task, Muon updates the matrices of hidden layers: the two-dimensional weights (`weight`, `weight_ih`, …) of the
    modules inside a backbone, encoder or decoder, without its embeddings. Token embeddings, front ends, heads and
    output layers, biases, norms, learned positions, and the vectors of relative positions are AdamW's. In code of
    your own, Muon updates all parameters of two dimensions until `use_muon_for` is called.

    Its parameter groups are Muon's, then AdamW's; a schedule changes the rates of both.

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
        self.parts: tuple[Optimizer, Optimizer] = (
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
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.defaults = {name: value for part in self.parts for name, value in part.defaults.items()}
        self._share()

    def use_muon_for(self, matrices: Iterable[Tensor]) -> None:
        """Use Muon for these matrices alone. Call it before the first step and before a schedule is made.

        Raises:
            ValueError: If none of them is one of the optimiser's matrices.
        """
        wanted = {id(p) for p in matrices}
        of_muon, of_adamw = (group["params"] for group in self.param_groups)
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the two optimisers use the groups and the state of this one."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.__setstate__({"param_groups": [group], "state": self.state})


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
        if module in layers and not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight") and parameter.ndim == 2
    ]
