"""Parameters divided between two processes: losses, parameters and checkpoints are those of one process."""

import errno
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader

from lit_effattn import LSTM, Transformer, checkpoint_folders
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    TransformerXLAttention,
)
from lit_effattn.callbacks import (
    CheckFinite,
    ClipEachParameter,
    FeatureRedraw,
    LastCheckpoint,
    MemoryCarry,
    RandomStates,
    SampleGrid,
)
from lit_effattn.checkpoint_files import unfinished
from lit_effattn.checkpoint_folders import read_mine
from lit_effattn.checkpoints import AtomicCheckpointIO, read_checkpoint
from lit_effattn.datamodules import PairBatch, SpeechBatch, TokenBatch
from lit_effattn.datamodules.labelled import LabelledBatch
from lit_effattn.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.nn.transfer import begin_transfer
from lit_effattn.sharding import ShardedStrategy, gather, release, shard
from lit_effattn.tasks import LanguageModel, PixelModel, SequenceClassifier, SequenceToSequence, SpeechRecognizer, Task
from tests.laws.cases import ATTENTIONS
from tests.support.commands import assert_same_end, same

P, E, H, V, N, STEPS = 2, 8, 2, 13, 12, 3
SHARED_UV = partial(TransformerXLAttention, mem_len=5, share_uv=True)
PERFORMER = partial(PerformerAttention, n_features=6, chunk_size=4)


def stack(attention: Any, **options: Any) -> Transformer:
    return Transformer(E, H, 2, attention=attention, **{"positions": "auto", "init": "pytorch", **options})


def language(attention: Any, **options: Any) -> LanguageModel:
    return LanguageModel(stack(attention), V, **options)


def compiled() -> LanguageModel:
    task = language(PERFORMER)
    task.compile_objective("aot_eager")
    return task


def transfer() -> LanguageModel:
    task = language(PERFORMER)
    begin_transfer(task, language(SoftmaxAttention))
    return task


def adaptive() -> LanguageModel:
    head, embedding = (partial(kind, cutoffs=[4, 8], div_value=2.0) for kind in (AdaptiveHead, AdaptiveEmbedding))
    return LanguageModel(stack(LinearAttention), V, head=head, embedding=embedding, tie=True)


def translation() -> SequenceToSequence:
    decoder = stack(LinearAttention, cross_attention=LinearCrossAttention)
    return SequenceToSequence(EncoderDecoder(stack(LinearAttention, causal=False), decoder), V, V, tie="all")


def speech(backbone: Any) -> SpeechRecognizer:
    return SpeechRecognizer(backbone, n_mels=5, phones=("a", "b"))


QUICK: dict[str, Callable[[], Task]] = {
    "shared u and v, tied": lambda: language(SHARED_UV, tie=True),
    "adaptive, tied": adaptive,
    "checkpointed blocks, losses of all layers": lambda: LanguageModel(
        stack(PERFORMER, gradient_checkpointing=True), V, intermediate_losses=True, n_targets=2
    ),
    "LSTM": lambda: LanguageModel(LSTM(E, 2), V),
    "Bi-LSTM": lambda: speech(LSTM(E, 1, causal=False)),
    "encoder and decoder, all tied": translation,
}
TASKS: dict[str, Callable[[Any], Task]] = {
    "LanguageModel": lambda kind: LanguageModel(stack(kind, positions=None), V),
    "PixelModel": lambda kind: PixelModel(stack(kind), (2, 3, 2), n_levels=V),
    "SpeechRecognizer": lambda kind: speech(stack(kind)),
    "SequenceClassifier": lambda kind: SequenceClassifier(stack(kind), ("a", "b"), vocab_size=V),
    "SequenceToSequence": lambda kind: SequenceToSequence(
        EncoderDecoder(stack(kind), stack(kind, cross_attention=SoftmaxCrossAttention)), V, V
    ),
}
OF_A_KIND = {case.make.func.__name__: case.make for case in reversed(ATTENTIONS) if case.causal}
EVERY: dict[str, Callable[[], Task]] = {
    f"{task}, {kind}": partial(TASKS[task], make) for task in TASKS for kind, make in OF_A_KIND.items()
}
EVERY |= {"compiled": compiled, "attention transfer": transfer}
CASES = {"quick": QUICK, "every": EVERY}


def batch(task: Task, step: int, rank: int) -> Any:
    """Two rows for each process, of different lengths where the task knows lengths."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(V, (2, N + 1), generator=draw)
    lengths = torch.tensor([N, N - 3 - rank])
    if isinstance(task, PixelModel):
        return tokens[:, :N]
    if isinstance(task, LanguageModel):
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], fresh=torch.tensor([step == 0, rank == 0]))
    if isinstance(task, SpeechRecognizer):
        features = torch.randn(2, N, task.n_mels, generator=draw, dtype=task.output.weight.dtype)
        return SpeechBatch(features, lengths, torch.tensor([[1, 2], [2, 0]]), torch.tensor([2, 1]), ["x", "y"])
    if isinstance(task, SequenceClassifier):
        return LabelledBatch(tokens, torch.tensor([0, rank]), lengths)
    return PairBatch(tokens[:, 1:], lengths, tokens[:, :-1], tokens[:, 1:], lengths, ["x", "y"], [["x"], ["y"]])


def train(
    make: Callable[[], Task], rank: int | None, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Take steps with a carried memory, clipping and redrawing; of one process, with both batches, if rank is None.

    Returns:
        The loss of each step and process, and the parameters and buffers.
    """
    torch.manual_seed(0 if rank is None else rank)  # the first process's parameters count
    task = make().to(dtype)
    if rank is not None:
        shard(task, init_device_mesh("cpu", (P,)))
        shard(task, init_device_mesh("cpu", (P,)))  # does nothing
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    memories, losses = dict.fromkeys(range(P)), []
    for step in range(STEPS):
        for r in range(P) if rank is None else [rank]:
            if isinstance(task, LanguageModel) and task.backbone.bounded_by is None:
                given = memories[r] or task.backbone.initial_state(2)
                task.memory = task.backbone.reset(given, batch(task, step, r).fresh)
            loss = task.training_step(batch(task, step, r))
            memories[r] = task.memory
            (loss / P if rank is None else loss).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(task.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for module in task.modules():
            if isinstance(module, PerformerAttention):
                module.redraw(torch.Generator().manual_seed(step))
    if rank is None:
        return losses, task.state_dict()
    gather(task)
    with torch.no_grad():  # without the other process
        assert rank or task.training_step(batch(task, 0, 0)).isfinite()
    release(task)
    return losses, {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in task.state_dict().items()}


# ----------------------------------------------------------------------------------------------------------- whole runs


class Levels:
    """Four images a step, of which each process has its part."""

    def __getitem__(self, step: int) -> Tensor:
        if step >= 4:
            raise IndexError
        rows = 4 // dist.get_world_size() if dist.is_initialized() else 4
        first = rows * dist.get_rank() if dist.is_initialized() else 0
        return torch.randint(V, (4, 12), generator=torch.Generator().manual_seed(step))[first : first + rows]

    def __len__(self) -> int:
        return 4


PARTS = partial(ShardedStrategy, save_distributed_checkpoint=True)


def run(folder: Path, steps: int, strategy: Any, ckpt_path: Path | None = None) -> Path:
    """Train to a step; return the last checkpoint."""
    torch.manual_seed(0)
    task = PixelModel(stack(PERFORMER, gradient_checkpointing=True), (2, 3, 2), n_levels=V)
    callbacks = [FeatureRedraw(1), ClipEachParameter(0.1), CheckFinite(), RandomStates(), LastCheckpoint(keep=4)]
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=P if dist.is_initialized() else 1,
        strategy=strategy,
        max_epochs=steps // 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[*callbacks, SampleGrid(n_samples=1)],
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = [DataLoader(Levels(), batch_size=None, shuffle=False) for _ in range(2)]
    trainer.fit(task, *loaders, ckpt_path=ckpt_path)
    return folder / "checkpoints" / "last.ckpt"


class FullOn(pl.Callback):
    """The disk of one process is full after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and dist.get_rank() == self.rank:
            self.real, checkpoint_folders.write = checkpoint_folders.write, self.fail

    def on_exception(self, *_: object) -> None:
        checkpoint_folders.write = getattr(self, "real", checkpoint_folders.write)

    def fail(self, content: dict[str, Any], path: Path) -> None:
        path.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")


def carry(folder: Path, strategy: Any, *more: pl.Callback) -> Path:
    """Train for two steps with a memory, of which each process has its own; return the last checkpoint."""
    torch.manual_seed(0)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=P,
        strategy=strategy,
        max_steps=2,
        callbacks=[MemoryCarry(), LastCheckpoint(every_n_train_steps=1), *more],
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = language(SHARED_UV)
    batches = [batch(task, step, dist.get_rank()) for step in range(2)]
    trainer.fit(task, DataLoader(batches, batch_size=None))
    return folder / "checkpoints" / "last.ckpt"


def failed(folder: Path) -> list[str]:
    """What this process says where the disk of one is full."""
    said = []
    for rank in range(P):
        with pytest.raises(OSError, match="could not be written") as caught:
            carry(folder / str(rank), PARTS(), FullOn(rank, 1))
        said.append(str(caught.value))
    return said


SHARDED = "ModelParallelStrategy"


def work(rank: int, folder: Path, cases: str) -> None:
    torch.set_num_threads(1)
    both = {"WORLD_SIZE": P, "LOCAL_WORLD_SIZE": P, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": 0}
    os.environ.update({name: str(n) for name, n in both.items()}, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{cases}", rank=rank, world_size=P)
    found: dict[str, Any] = {name: train(make, rank) for name, make in CASES[cases].items()}
    if cases == "quick":
        run(folder / "whole", 4, SHARDED)
        run(folder / "parts", 4, PARTS())
        with mock.patch("lit_effattn.checkpoints.read_whole", None):
            run(folder / "from parts", 4, PARTS(), folder / "parts" / "checkpoints" / "step_00000002.ckpt")
        carry(folder / "memory whole", SHARDED)
        if rank == 0:  # of a process that was killed, and had the same number
            (unfinished(folder / "memory parts" / "checkpoints" / "last.ckpt") / "left").mkdir(parents=True)
        found["mine"] = read_mine(carry(folder / "memory parts", PARTS()))["memory_carry"]
        found["failed"] = failed(folder / "failed")
        for before in ("whole", "one"):
            run(folder / f"from {before}", 4, SHARDED, folder / before / "checkpoints" / "step_00000002.ckpt")
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def spawned(folder: Path, cases: str) -> list[dict[str, Any]]:
    """Return what each process found."""
    mp.spawn(work, (folder, cases), nprocs=P)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(P)]


def assert_like_one(make: Callable[[], Task], found: list[Any]) -> None:
    losses, parameters = train(make, None)
    for rank, (own, whole) in enumerate(found):
        torch.testing.assert_close(own, losses[rank::P])
        torch.testing.assert_close(whole, dict(parameters))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each process found; beside it the runs of one process and of two."""
    run(folder / "one", 4, "auto")
    return spawned(folder, "quick")


@pytest.mark.parametrize("name", QUICK)
def test_losses_and_parameters_are_those_of_one_process(name: str, found: list[dict[str, Any]]):
    assert_like_one(QUICK[name], [of_rank[name] for of_rank in found])


@pytest.mark.exhaustive
def test_every_kind_and_task(folder: Path):
    found = spawned(folder, "every")
    for name, make in EVERY.items():
        assert_like_one(make, [of_rank[name] for of_rank in found])


def test_a_run_is_that_of_one_process_and_resumes_exactly(folder: Path, found: list[dict[str, Any]]):
    names = ("one", "whole", "from whole", "from one")
    one, whole, resumed, other_number = (folder / name / "checkpoints" / "last.ckpt" for name in names)
    assert_same_end(whole, resumed)
    one, *others = (torch.load(path, weights_only=True) for path in (one, whole, other_number))
    assert one["global_step"] == 4
    for other in others:
        assert other.keys() == one.keys()
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(other[part], one[part])
    assert len(list((folder / "whole" / "samples").iterdir())) == 2


def leaves(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a checkpoint, and the rest."""
    found = {keystr(key): leaf for key, leaf in tree_flatten_with_path(read_checkpoint(path))[0]}
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}
    return tensors, {name: leaf for name, leaf in found.items() if name not in tensors}


@pytest.mark.parametrize("name", ["", "memory "])
def test_parts_put_together_are_the_file_of_one_process(name: str, folder: Path, found: list[dict[str, Any]]):
    whole, parts = (folder / f"{name}{kind}" / "checkpoints" for kind in ("whole", "parts"))
    files = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in parts.iterdir()) == files
    for file in files:
        (tensors, rest), (others, others_rest) = leaves(whole / file), leaves(parts / file)
        assert same(tensors, others)
        assert rest == others_rest
        assert sorted(path.name for path in (parts / file).iterdir()) == ["common.pt", "part_00000.pt", "part_00001.pt"]


def test_each_process_keeps_its_own_memory(folder: Path, found: list[dict[str, Any]]):
    memories = read_checkpoint(folder / "memory parts" / "checkpoints" / "last.ckpt")["memory_carry"]
    assert len(memories) == P
    assert repr(memories[0]) != repr(memories[1])
    for rank, of_rank in enumerate(found):
        assert repr(of_rank["mine"]) == repr([memories[r] if r == rank else None for r in range(P)])


def test_a_run_resumes_from_parts_with_any_number_of_processes(folder: Path, found: list[dict[str, Any]]):
    parts = folder / "parts" / "checkpoints"
    one = run(folder / "one from parts", 4, "auto", parts / "step_00000002.ckpt")
    paths = (parts / "last.ckpt", folder / "from parts" / "checkpoints" / "last.ckpt", one)
    whole, two, one = map(read_checkpoint, paths)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(two[part], whole[part], rtol=0, atol=0)
        torch.testing.assert_close(one[part], whole[part])


def test_a_full_disk_of_one_process_stops_all_and_leaves_the_checkpoint_before(folder: Path, found: list[Any]):
    for rank in range(P):
        checkpoints = folder / "failed" / str(rank) / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["last.ckpt"]
        assert read_checkpoint(checkpoints / "last.ckpt")["global_step"] == 1
        for said in (of_rank["failed"][rank] for of_rank in found):
            assert re.search(r"last\.ckpt could not be written: No space left on device; .* still intact", said)
        assert f"(process {rank})" in found[1 - rank]["failed"][rank]


# -------------------------------------------------------------------------------------------------------- the refusals


def test_what_is_not_supported_is_refused():
    with pytest.raises(ValueError, match=r"ModelParallelStrategy: tensor_parallel_size=2 .* leave it out"):
        ShardedStrategy(tensor_parallel_size=2)
    strategy = ShardedStrategy(data_parallel_size=3)
    strategy.parallel_devices = [torch.device("cpu")] * P
    with pytest.raises(ValueError, match="data_parallel_size=3 is not the number of processes, 2; leave it out"):
        strategy.setup_environment()
    task = language(PERFORMER)
    task._device_mesh, task._trainer = object(), SimpleNamespace(strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"strategy=ModelParallelStrategy: .* use lit_effattn.sharding.Sharded"):
        task.configure_model()


def test_the_command_puts_it_in_the_place_of_lightning_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.cli.test_command import CONFIGS, built  # not at the top: each process imports this module

    monkeypatch.chdir(tmp_path)
    options = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    spec = json.dumps({"class_path": "ModelParallelStrategy", "init_args": options})
    flags = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", spec]
    made = built(CONFIGS[0], *flags)
    assert type(made.trainer.strategy) is ShardedStrategy
    assert not made.trainer.strategy.saves_parts
    assert made.settings()["trainer"]["strategy"]["class_path"] == "lit_effattn.sharding.ShardedStrategy"
