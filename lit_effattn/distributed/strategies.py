"""Strategies of Lightning's trainer: how processes share the work."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lit_effattn.checks import at_least
from lit_effattn.distributed.sequence_parallel import Parts
from lit_effattn.sequence import SequenceModule, in_parts


class SequenceParallel(DDPStrategy):
    """Divides processes into groups of `size`. A group shares each sequence of a batch; groups have different batches.

        loss = mean over the groups of Σ_p (loss of part p, summed) / (number of targets in all parts)

    Process r has part r mod `size` of the sequences of group ⌊r / size⌋. All processes of a group read the same batch,
    and each computes its part of the time axis: see `sequence_parallel`. The data's rank and number of processes are
    those of the groups (`Trainer.distributed_sampler_kwargs`). Gradients are averaged over all processes, as by DDP.
    A carried memory is the same in all processes of a group. Each process has its own seed for dropout.

    Works with tasks that have `part_of(batch, rank, size)`, such as `LanguageModel`, and with backbones that support
    `sequence_parallel`. A batch's N positions are divided into `size` parts as equal as possible.

    Args:
        size: Number of processes that share a sequence.
        kwargs: Options of `DDPStrategy`.

    Raises:
        ValueError: If `size` is not positive, or, when a run starts, if it does not divide the number of processes, or
            the model does not support parts.
    """

    def __init__(self, size: int = 2, **kwargs: Any) -> None:
        at_least(1, size=size)
        super().__init__(**kwargs)
        self.size = size
        self._parts: Parts | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of groups, which read different batches, and the index of this process's group."""
        return {"num_replicas": self.num_nodes * self.num_processes // self.size, "rank": self.global_rank // self.size}

    def setup_distributed(self) -> None:
        """Make the groups."""
        world = self.num_nodes * self.num_processes
        if world % self.size:
            raise ValueError(
                f"SequenceParallel: size={self.size} does not divide the number of processes, {world}; give "
                "--trainer.devices a multiple of it"
            )
        super().setup_distributed()
        groups = [dist.new_group(range(first, first + self.size)) for first in range(0, world, self.size)]
        self._parts = Parts(groups[self.global_rank // self.size])  # type: ignore[arg-type]

    def setup(self, trainer: Trainer) -> None:
        """Check that the model supports parts, and give each process its own seed."""
        model = self.lightning_module
        if not hasattr(model, "part_of"):
            raise ValueError(f"SequenceParallel: {type(model).__name__} does not support it; LanguageModel does")
        assert model is not None
        for module in model.modules():
            if isinstance(module, SequenceModule) and not module.takes_parts:
                raise ValueError(f"SequenceParallel: {Parts.unsupported(module)}")
        super().setup(trainer)
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on this process's part."""
        return self._run_part(super().training_step, batch, *args, **kwargs)

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Score this process's part."""
        return self._run_part(super().validation_step, batch, *args, **kwargs)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Score this process's part."""
        return self._run_part(super().test_step, batch, *args, **kwargs)

    def _run_part(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.lightning_module
        assert self._parts is not None
        with in_parts(self._parts):
            return step(model.part_of(batch, self._parts.rank, self._parts.size), *args, **kwargs)
