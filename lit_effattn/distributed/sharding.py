"""Sharded training: each process holds a part of every parameter, its gradient and its optimiser state (FSDP2).

A unit, whose parameters are gathered together, is a Transformer's block or an LSTM. All other parameters of the model
belong to the unit of the root: embeddings, heads, front ends, tied weights, and parameters that several blocks share.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lit_effattn import sequence
from lit_effattn.checkpoints import folders as checkpoint_folders
from lit_effattn.checkpoints.folders import Divided, OfEach, share
from lit_effattn.checks import at_least
from lit_effattn.distributed.memories import Streams, WholeMemories, streams_of
from lit_effattn.distributed.tensor_parallel import all_heads, divide, my_heads
from lit_effattn.nn.lstm import LSTM
from lit_effattn.nn.transformer import Block
from lit_effattn.sequence import State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` whose parameters are gathered together, without the root."""
    return [module for module in model.modules() if isinstance(module, (Block, LSTM))]


def shard(model: nn.Module, mesh: DeviceMesh, heads: DeviceMesh | None = None) -> None:
    """Divide the parameters of `model` among processes, with the values of the first process.

    Parameters are then DTensors, except in `training_step`, its backward pass, and while the model is whole: see
    `whole`. A second call does nothing.

    Args:
        model: A module with a method `training_step`.
        mesh: The processes, in one dimension.
        heads: Further processes, in one dimension, that divide the heads: see `tensor_parallel`. They read the same
            batches, and each has other processes in `mesh`.
    """
    if isinstance(model, FSDPModule):
        return
    for group in [m.get_group() for m in (mesh, heads) if m is not None]:
        for tensor in (*model.parameters(), *model.buffers()):
            first = tensor.detach().to(mesh.device_type)
            dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
            tensor.detach().copy_(first)
    if heads is not None:
        divide(model, heads)
    parts = units(model)
    own = _of_one_unit(model, parts)
    shared = [{name for name, p in part.named_parameters() if p not in own} for part in parts]
    # The root comes first: otherwise it would ignore the shared parameters inside the units.
    fully_shard(model, mesh=mesh, ignored_params=own)
    for part, names in zip(parts, shared, strict=True):
        fully_shard(part, mesh=mesh, ignored_params={part.get_parameter(name) for name in names})
        if isinstance(part, Block):
            register_fsdp_forward_method(part, "remember")
    register_fsdp_forward_method(model, "training_step")


def _of_one_unit(model: nn.Module, parts: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that belong to exactly one unit, and to no module outside the units."""
    inside = {module for part in parts for module in part.modules()}
    outside = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    owners = Counter(p for part in parts for p in part.parameters())
    return {p for p, n in owners.items() if n == 1 and p not in outside}


def shard_module(model: LightningModule) -> None:
    """Divide the parameters of `model` if its trainer's strategy is `ShardedStrategy`. A second call does nothing.

    Raises:
        ValueError: If the strategy is Lightning's own `ModelParallelStrategy`.
    """
    mesh = model.device_mesh
    if mesh is None:
        return
    strategy = model.trainer.strategy
    if not isinstance(strategy, ShardedStrategy):
        raise ValueError(
            f"strategy={type(strategy).__name__}: its checkpoints can't be read safely; use "
            "lit_effattn.distributed.sharding.ShardedStrategy, which is otherwise the same"
        )
    for callback in model.trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it
        if isinstance(callback, WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the model, which strategy=ModelParallelStrategy can't do: leave one "
                "of them out, or average kept checkpoints (LastCheckpoint: keep)"
            )
    shard(model, mesh["data_parallel"], strategy.heads_mesh)
    for metric in model.modules():
        if isinstance(metric, Metric):  # processes that divide heads score the same batches
            metric.process_group = mesh["data_parallel"].get_group()


def gather(model: nn.Module) -> None:
    """Gather all parameters of a sharded `model` in every process, until `release`. All processes call it."""
    for part in _sharded(model):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def release(model: nn.Module) -> None:
    """Keep only this process's part of every parameter of a sharded `model`."""
    for part in _sharded(model):
        part.set_reshard_after_forward(part is not model, recurse=False)
        part.reshard()


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Hold all parameters of `model` in every process, so that evaluation and sampling need no other process.

    All processes enter and leave together. Does nothing if the model is not sharded.
    """
    gather(model)
    try:
        yield
    finally:
        release(model)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients so that their norm, of all parameters together, is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` does the same, but needs all parameters on one mesh.
    """
    by_mesh = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            by_mesh[getattr(p, "device_mesh", None)].append(p)
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)


def clip_gradients(
    model: LightningModule, optimizer: Optimizer, value: float | None = None, algorithm: str | None = None
) -> None:
    """Clip gradients by the trainer's options, also where processes divide heads: see `LightningModule.clip_gradients`.

    Args:
        model: Its trainer is in a training step.
        optimizer: The optimiser of the parameters.
        value: The largest norm or value. None or 0: gradients are not clipped.
        algorithm: "norm" or "value". Default: norm.
    """
    if value and heads_of(model.trainer) > 1 and algorithm != GradClipAlgorithmType.VALUE:
        clip_grad_norm(model.parameters(), value)
    else:
        model.clip_gradients(optimizer, value, algorithm)


def heads_of(trainer: Trainer) -> int:
    """Return the number of processes that divide the heads of each attention, 1 if all have all heads."""
    return trainer.strategy.heads_size if isinstance(trainer.strategy, ShardedStrategy) else 1


def _draw_alike(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the processes of `group` the random state of the first one."""
    for generator in (torch, torch.cuda) if device.type == "cuda" else (torch,):
        state = generator.get_rng_state().to(device)
        dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
        generator.set_rng_state(state.cpu())


def _full(tree: Any, keep: bool) -> Any:
    """Gather the DTensors in `tree`, on the CPU; if not `keep`, return empty tensors. All processes call it."""

    def full(t: DTensor) -> Tensor:
        gathered: Tensor = t.full_tensor()
        return gathered.cpu() if keep else gathered.new_empty(0)

    return tree_map_only(DTensor, full, tree)


def _divided(full: Any, like: Any) -> Any:
    """Return this process's part of the tensor `full`, divided as `like` if that is a DTensor."""
    if not isinstance(full, (Tensor, Divided)):
        return full
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full.whole() if isinstance(full, Divided) else full
    mesh, local = like.device_mesh, like.to_local()
    part: Any = full.whole() if isinstance(full, Divided) and mesh.ndim > 1 else full
    for i in reversed(range(mesh.ndim)):  # this process's heads, then its rows of them
        dim = getattr(like.placements[i], "dim", None)
        if dim is not None:  # None: all processes of this dimension have everything
            first, end = share(part.shape[dim], mesh.get_local_rank(i), mesh.size(i))
            part = part.rows(first, end) if isinstance(part, Divided) else part.narrow(dim, first, end - first)
    assert part.shape == local.shape
    placed = part.to(local.device, copy=True).contiguous()
    return DTensor.from_local(placed, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, which divides parameters, gradients and optimiser states among processes.

    `Trainer(strategy="ModelParallelStrategy")` selects it.

    Checkpoints are files with whole tensors, written by the first process, as with other strategies. Any number of
    processes can resume, score and sample from them with any strategy. Every process reads the file and keeps its part.
    With `save_distributed_checkpoint` checkpoints are folders: every process writes its own part, and reads what it
    needs (see `checkpoint_folders`).

    With `tensor_parallel_size` T, T processes compute different heads of the same batch (see `tensor_parallel`), and
    the parameters of these heads are divided among the processes with the same heads in other groups of T.

    In evaluation each process gathers all parameters once, so that processes may draw samples or search for different
    numbers of steps. A device must then hold all parameters, but neither gradients nor optimiser states.

    Args:
        data_parallel_size: Number of processes, or of groups that share heads, with different batches. Default: all.
        tensor_parallel_size: Number of processes that divide the heads and feed-forward layers. Default: 1.
        save_distributed_checkpoint: Whether every process writes its own part of a checkpoint, which is then a folder;
            else the first process gathers and writes all of it.
        kwargs: `process_group_backend` and `timeout` of `ModelParallelStrategy`.

    Raises:
        ValueError: If `tensor_parallel_size` is not positive or given with `save_distributed_checkpoint`, or, when a
            run starts, if the product of the two sizes is not the number of processes.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        heads = 1 if tensor_parallel_size == "auto" else tensor_parallel_size
        at_least(1, tensor_parallel_size=heads)
        if heads > 1 and save_distributed_checkpoint:
            raise ValueError(
                f"ModelParallelStrategy: save_distributed_checkpoint=True with tensor_parallel_size={heads} is not "
                "supported, since parts are rows of tensors; leave it out, and checkpoints are single files"
            )
        super().__init__(data_parallel_size, heads, save_distributed_checkpoint, **kwargs)
        self.saves_parts = save_distributed_checkpoint
        self.heads_size = heads

    def setup_environment(self) -> None:
        """Start the processes' communication."""
        world = self.num_nodes * self.num_processes
        if world % self.heads_size:
            raise ValueError(
                f"ModelParallelStrategy: tensor_parallel_size={self.heads_size} does not divide the number of "
                f"processes, {world}; give --trainer.devices a multiple of it"
            )
        groups = world // self.heads_size
        if self._data_parallel_size not in ("auto", groups):
            raise ValueError(
                f"ModelParallelStrategy: data_parallel_size={self._data_parallel_size} is not the number of processes, "
                f"{world}, divided by tensor_parallel_size={self.heads_size}; leave it out"
            )
        self._data_parallel_size = groups
        if self.heads_size > 1:  # hide its warnings that two dimensions take two messages
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        super().setup_environment()

    @property
    def heads_mesh(self) -> DeviceMesh | None:
        """The processes that divide heads with this one. None: all processes have all heads."""
        return self.device_mesh["tensor_parallel"] if self.heads_size > 1 else None

    @property
    def streams(self) -> Streams:
        """The streams of data, one for each process or each group of processes that divide heads."""
        return streams_of(self.distributed_sampler_kwargs)

    def gather_memory(self, memory: State | None) -> Any:
        """Return the memories of all heads for a checkpoint: see `MemoryStrategy`. A folder has each process's own."""
        if memory is not None and self.heads_mesh is not None:
            memory = all_heads(memory, self.heads_mesh)
        if self.saves_parts:
            return OfEach(sequence.pack(sequence.to(memory, "cpu")))
        return WholeMemories(self.streams, self.world_size).gather_memory(memory)

    def scatter_memory(self, memories: Sequence[Any], like: State) -> State | None:
        """Return the memory of this process's heads: see `MemoryStrategy`."""
        memory = WholeMemories(self.streams, self.world_size).scatter_memory(memories, like)
        return memory if memory is None or self.heads_mesh is None else my_heads(memory, self.heads_mesh)

    def setup(self, trainer: Trainer) -> None:
        """Set up the model and the optimiser, and give processes that divide heads the same random state."""
        super().setup(trainer)
        if self.heads_mesh is not None:
            _draw_alike(self.heads_mesh.get_group(), self.root_device)
        assert isinstance(self.model, FSDPModule)
        self.model._get_fsdp_state()._lazy_init()  # otherwise the first block that is called would become the root

    def teardown(self) -> None:
        """End the processes' communication, and wait until checkpoints are written."""
        super().teardown()
        self.checkpoint_io.teardown()

    # ---------------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self) -> None:
        """Gather the parameters."""
        assert self.model is not None
        gather(self.model)

    def on_validation_end(self) -> None:
        """Divide the parameters again."""
        assert self.model is not None
        release(self.model)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # --------------------------------------------------------------------------------------------------- checkpoints

    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state in the first process, an empty dict in the others; or each process's part."""
        model = self.model
        assert model is not None
        gathered = any(not isinstance(p, DTensor) for p in model.parameters())
        state = self._saved(model.state_dict())  # divides the parameters
        if gathered:
            gather(model)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state in the first process, an empty dict in the others; or each process's part."""
        return self._saved(ParallelStrategy.optimizer_state(self, optimizer))

    def _saved(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.saves_parts:
            return state
        full: dict[str, Any] = _full(state, keep=self.is_global_zero)
        return full if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: the first process a file, or every process its part of a folder."""
        if self.saves_parts:
            checkpoint_folders.save(checkpoint, Path(self.broadcast(filepath)))
        else:
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file as other strategies do; read this process's part of a folder.

        Raises:
            ValueError: If a file is damaged, or `weights_only=False`, which would run code from a file.
        """
        reads_otherwise = getattr(self.checkpoint_io, "reads_otherwise", False)  # an average, say
        if weights_only is False or reads_otherwise or not Path(checkpoint_path).is_dir():
            return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        return checkpoint_folders.read_local(Path(checkpoint_path))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's part of the parameters."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        divided = {name: _divided(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(divided, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimisers' part of the states."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [i for group in saved["param_groups"] for i in group["params"]]
            by_number = dict(zip(numbers, parameters, strict=True))
            state = {
                i: {name: _divided(value, by_number[i]) for name, value in values.items()}
                for i, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


StrategyRegistry.register(
    ModelParallelStrategy.__name__.lower(),  # the name that Lightning uses
    ShardedStrategy,
    description="Divides parameters, gradients and optimiser states among processes (FSDP2)",
    override=True,
)
