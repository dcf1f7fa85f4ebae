"""Learning-rate schedules that can be written in YAML (torch's `LambdaLR` and `SequentialLR` can't)."""

from __future__ import annotations

import math
from typing import Literal

from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_effattn import registry
from lit_effattn.checks import at_least, one_of


class _OverTheRun(LambdaLR):
    """A linear warm-up over `warmup_steps`, and a factor that ends at `final` at `total_steps`. See the subclasses."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None,
        warmup_steps: int | float,
        final: float,
        **further_steps: int | float,
    ) -> None:
        at_least(1, total_steps=total_steps)
        self.total_steps, self.warmup_steps, self.final = total_steps, warmup_steps, final
        for name, steps in {"warmup_steps": warmup_steps, **further_steps}.items():
            if isinstance(steps, float) and not 0 <= steps < 1:
                raise ValueError(
                    f"{name}={steps} must be a fraction from 0 to below 1; give numbers of steps as integers"
                )
            if steps < 0 or (total_steps is not None and steps >= total_steps):
                raise ValueError(f"{name}={steps} must be from 0 to below total_steps={total_steps}")
        if not 0 <= final <= 1:
            raise ValueError(f"final={final} must be a fraction of the peak, from 0 to 1")
        super().__init__(optimizer, self._factor)

    def set_total_steps(self, run_steps: float) -> None:
        """Set `total_steps` to the steps of the run, unless it is known. Call it before the first step.

        Raises:
            ValueError: If the run has no limit, or is not longer than the warm-up.
        """
        if self.total_steps is not None:
            return
        if math.isinf(run_steps):
            raise ValueError("total_steps=None: the run has no limit in steps; give total_steps or max_steps")
        if self.warmup_steps >= run_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be below the {run_steps} steps of the run; "
                "give a fraction of the run, such as 0.1, or train longer"
            )
        self.total_steps = int(run_steps)
        for group, peak in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = peak * self._factor(0)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _factor(self, step: int) -> float:
        if self.total_steps is None:
            if step > 0:
                raise ValueError("total_steps=None: give the steps of the run, or call set_total_steps first")
            return 1.0  # no step is taken at this rate
        return self._of_peak(step, _steps(self.warmup_steps, self.total_steps), self.total_steps)

    def _of_peak(self, step: int, warmup: int, total: int) -> float:
        """Return the rate of a step, counted from 0, as a fraction of the peak."""
        raise NotImplementedError


def _steps(steps: int | float, total: int) -> int:
    """Return a number of steps that may be given as a fraction of `total`."""
    return round(steps * total) if isinstance(steps, float) else steps


class WarmupCosine(_OverTheRun):
    """Linear warm-up over `warmup_steps`, then half a cosine down to `final` times the peak at `total_steps`.

    The rate is constant after `total_steps`. Steps are optimiser steps.

    Args:
        optimizer: Its learning rate is the peak.
        total_steps: Steps of the whole run. Default: those of the trainer's `max_steps` or `max_epochs`. The number is
            fixed when the run starts and is part of its checkpoints.
        warmup_steps: Steps of the warm-up, or as a float below 1 their fraction of `total_steps`.
        final: Final rate, as a fraction of the peak.
        cosine_from_start: Whether the cosine runs over all `total_steps`, and the warm-up replaces its first steps, as
            in the PyTorch code of Dai et al. 2019. That code sets the rate after each update. So the first update has
            the peak rate, and update i, counted from 0, has i / warmup_steps of it while i is below `warmup_steps`.
            Default: the cosine begins at the end of the warm-up.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int | float = 0,
        final: float = 0.0,
        cosine_from_start: bool = False,
    ) -> None:
        self.cosine_from_start = cosine_from_start
        super().__init__(optimizer, total_steps, warmup_steps, final)

    def _of_peak(self, step: int, warmup: int, total: int) -> float:
        if self.cosine_from_start and 0 < step < warmup:
            return step / warmup
        if not self.cosine_from_start and step < warmup:
            return (step + 1) / warmup
        start = 0 if self.cosine_from_start else warmup
        done = min(1.0, (step - start) / max(total - start, 1))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


class WarmupStableDecay(_OverTheRun):
    """Linear warm-up over `warmup_steps`, the peak, then a decay to `final` times the peak over the last `decay_steps`.

        linear: factor = 1 − (1 − final) · done,    sqrt: factor = 1 − (1 − final) · √done

    where done = (step − total_steps + decay_steps) / decay_steps. Hu et al. 2024, section 4.2; the two decays are
    those of Hägele et al. 2024, section 3.2, where 1 − √done with 10 to 20 % of the steps is the best. The rate before
    the decay does not depend on the length of the run. It is constant after `total_steps`. Steps are optimiser steps.

    Args:
        optimizer: Its learning rate is the peak.
        total_steps: Steps of the whole run: see `WarmupCosine`.
        warmup_steps: Steps of the warm-up, or as a float below 1 their fraction of `total_steps`.
        decay_steps: Steps of the decay, likewise.
        final: Final rate, as a fraction of the peak.
        decay: The shape of the decay.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int | float = 0,
        decay_steps: int | float = 0.2,
        final: float = 0.0,
        decay: Literal["linear", "sqrt"] = "sqrt",
    ) -> None:
        one_of(("linear", "sqrt"), decay=decay)
        self.decay_steps, self.decay = decay_steps, decay
        super().__init__(optimizer, total_steps, warmup_steps, final, decay_steps=decay_steps)

    def _of_peak(self, step: int, warmup: int, total: int) -> float:
        length = _steps(self.decay_steps, total)
        if warmup + length > total:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} are {warmup + length} steps, "
                f"more than the {total} of the run; give fractions of the run, such as 0.1, or train longer"
            )
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, max(0, step - total + length) / max(length, 1))
        return 1 - (1 - self.final) * (math.sqrt(done) if self.decay == "sqrt" else done)


class InverseSquareRoot(LambdaLR):
    """Linear warm-up over `warmup_steps`, then decay with the inverse square root of the step.

        rate(step) = peak · min(step / warmup_steps, √(warmup_steps / step)),  step = 1, 2, …

    Vaswani et al. 2017, equation 3, divided by its peak, which is reached at step `warmup_steps`. The paper's rate is
    d_model^−½ · min(step^−½, step · warmup_steps^−1.5), so its peak is (d_model · warmup_steps)^−½: 7·10⁻⁴ for the base
    model's 512 and 4000. Steps are optimiser steps.

    Args:
        optimizer: Its learning rate is the peak.
        warmup_steps: Steps of the warm-up; 1 starts at the peak.

    Raises:
        ValueError: If `warmup_steps` is not positive.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 4000) -> None:
        at_least(1, warmup_steps=warmup_steps)
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, self._factor)

    def _factor(self, steps_taken: int) -> float:
        step = steps_taken + 1
        return min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))


_OF_TORCH = (kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and issubclass(kind, LRScheduler))
registry.enter(WarmupCosine, WarmupStableDecay, InverseSquareRoot, ReduceLROnPlateau, *_OF_TORCH)
