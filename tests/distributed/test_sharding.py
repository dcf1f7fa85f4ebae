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
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader

from lit_effattn import LSTM, Transformer
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerAttention,
    PerformerCrossAttention,
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
from lit_effattn.checkpoints import folders as checkpoint_folders
from lit_effattn.checkpoints.files import unfinished
from lit_effattn.checkpoints.folders import read_local
from lit_effattn.checkpoints.io import AtomicCheckpointIO, read_checkpoint
from lit_effattn.datamodules import IGNORE, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.datamodules.common.labelled import LabelledBatch
from lit_effattn.distributed.sharding import ShardedStrategy, clip_grad_norm, gather, release, shard
from lit_effattn.nn.adaptive import AdaptiveEmbedding, AdaptiveHead
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.nn.transfer import begin_transfer
from lit_effattn.tasks import LanguageModel, PixelModel, SequenceClassifier, SequenceToSequence, SpeechRecognizer, Task
from tests.laws.cases import ATTENTIONS
from tests.support.commands import assert_same_end, same
from tests.support.processes import in_processes

P, E, H, V, N, STEPS = 2, 8, 2, 13, 12, 2
SHARED_UV = partial(TransformerXLAttention, mem_len=5, share_uv=True)
PERFORMER = partial(PerformerAttention, n_features=6, chunk_size=4)


def stack(attention: Any, n_heads: int = H, n_layers: int = 2, **options: Any) -> Transformer:
    return Transformer(E, n_heads, n_layers, attention=attention, **{"positions": "auto", "init": "pytorch", **options})


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
OF_DIVIDED_HEADS = {name: make for name, make in EVERY.items() if make.args[0](E, H).divides_heads}
OF_DDP = dict(EVERY)
EVERY |= {"compiled": compiled, "attention transfer": transfer}
CASES = {"quick": QUICK, "every": EVERY}


four_heads = partial(stack, n_heads=4)


def source_and_target() -> SequenceToSequence:
    decoder = four_heads(LinearAttention, cross_attention=[PerformerCrossAttention, SoftmaxCrossAttention])
    return SequenceToSequence(EncoderDecoder(four_heads(SoftmaxAttention, causal=False), decoder), V, V)


GROUPED = partial(SoftmaxAttention, window=5, n_kv_heads=2, head_dim=6, qk_norm=True)
DIVIDED_HEADS: dict[str, Callable[[], Task]] = {
    "grouped softmax, normalised": lambda: LanguageModel(four_heads(GROUPED), V),
    "linear, swiglu, checkpointed, tied": lambda: LanguageModel(
        four_heads(LinearAttention, activation="swiglu", d_ff=12, gradient_checkpointing=True), V, tie=True
    ),
    "Performer": lambda: LanguageModel(four_heads(PERFORMER), V),
    "encoder and decoder": source_and_target,
}


def divided_and_compiled() -> LanguageModel:
    task = DIVIDED_HEADS["Performer"]()
    task.compile_objective("aot_eager")
    return task


MORE_DIVIDED_HEADS: dict[str, Callable[[], Task]] = DIVIDED_HEADS | {
    "stabilised Performer": lambda: LanguageModel(four_heads(partial(PERFORMER, eps=1e-3)), V),
    "ReLU Performer": lambda: PixelModel(four_heads(partial(PERFORMER, features="relu")), (2, 3, 2), n_levels=V),
    "speech": lambda: speech(four_heads(LinearAttention, causal=False)),
    "classes": lambda: SequenceClassifier(four_heads(LinearAttention), ("a", "b"), vocab_size=V),
    "compiled": divided_and_compiled,
}


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
    targets = tokens[:, 1:].masked_fill(torch.arange(N) >= lengths[:, None], IGNORE)
    return PairBatch(tokens[:, 1:], lengths, tokens[:, :-1], targets, lengths, ["x", "y"], [["x"], ["y"]])


class Step(nn.Module):
    """What DistributedDataParallel wraps, as Lightning has it do."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Tensor:
        return self.task.training_step(batch)


def train(
    make: Callable[[], Task],
    rank: int | None,
    dtype: torch.dtype = torch.float64,
    streams: int = P,
    heads: int = 1,
    ddp: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Take steps with a carried memory, clipping and redrawing; of one process, with all batches, if rank is None.

    Otherwise `streams` groups have batches of their own, and the `heads` processes of a group divide the heads; `ddp`:
    nothing is divided.

    Returns:
        The loss of each step and process, and the parameters and buffers.
    """
    torch.manual_seed(0 if rank is None else rank)  # the first process's parameters count
    task = make().to(dtype)
    if rank is not None and not ddp:
        meshes = init_device_mesh("cpu", (streams, heads), mesh_dim_names=("batches", "heads"))
        for _ in range(2):  # the second call does nothing
            shard(task, meshes["batches"], meshes["heads"] if heads > 1 else None)
    step_of = (
        nn.parallel.DistributedDataParallel(Step(task), find_unused_parameters=True) if ddp else task.training_step
    )
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    memories, losses = dict.fromkeys(range(streams)), []
    for step in range(STEPS):
        for r in range(streams) if rank is None else [rank // heads]:
            if isinstance(task, LanguageModel) and task.backbone.bounded_by is None:
                given = memories[r] or task.backbone.initial_state(2)
                task.memory, task.carries = task.backbone.reset(given, batch(task, step, r).fresh), True
            loss = step_of(batch(task, step, r))
            memories[r] = task.memory
            (loss / streams if rank is None else loss).backward()
            losses.append(loss.detach())
        (nn.utils.clip_grad_norm_ if heads == 1 else clip_grad_norm)(task.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for module in task.modules():
            if isinstance(module, (PerformerAttention, PerformerCrossAttention)):
                module.redraw(torch.Generator().manual_seed(step))
    if rank is None or ddp:
        return losses, task.state_dict()
    gather(task)
    with torch.no_grad():  # without the processes of other batches
        assert rank >= heads or task.training_step(batch(task, 0, 0)).isfinite()
    release(task)
    return losses, {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in task.state_dict().items()}


# ----------------------------------------------------------------------------------------------------------- whole runs


def place(strategy: Any) -> tuple[int, int]:
    """Return how many groups of processes have batches of their own, and which of them this one is in."""
    heads = getattr(strategy, "heads_size", 1)
    return (dist.get_world_size() // heads, dist.get_rank() // heads) if dist.is_initialized() else (1, 0)


class Levels:
    """Four images a step, of which each process has its part, or each group of processes that divide heads."""

    def __init__(self, strategy: Any) -> None:
        self.streams, self.rank = place(strategy)

    def __getitem__(self, step: int) -> Tensor:
        if step >= len(self):
            raise IndexError
        rows = 4 // self.streams
        first = rows * self.rank
        return torch.randint(V, (4, 12), generator=torch.Generator().manual_seed(step))[first : first + rows]

    def __len__(self) -> int:
        return 2


PARTS = partial(ShardedStrategy, save_distributed_checkpoint=True)
HEADS = partial(ShardedStrategy, tensor_parallel_size=P)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    n = P if dist.is_initialized() else 1
    return pl.Trainer(
        accelerator="cpu", devices=n, strategy=strategy, use_distributed_sampler=False, **quiet, **options
    )


def run(folder: Path, strategy: Any, ckpt_path: Path | None = None, kind: Any = PERFORMER) -> Path:
    """Train for two epochs of one step; return the last checkpoint."""
    torch.manual_seed(0)
    backbone, adamw = stack(kind, n_layers=1, gradient_checkpointing=True), partial(torch.optim.AdamW, weight_decay=0.1)
    task = PixelModel(backbone, (2, 3, 2), n_levels=V, optimizer=adamw, decay_biases_and_gains=False).double()
    redraw = [FeatureRedraw(1)] if hasattr(kind(E, H), "redraw") else []
    callbacks = [*redraw, ClipEachParameter(0.1), CheckFinite(), RandomStates(), LastCheckpoint(keep=4)]
    made = trainer(
        strategy,
        default_root_dir=folder,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[*callbacks, SampleGrid(n_samples=1)],
        plugins=[AtomicCheckpointIO()],
    )
    loaders = [DataLoader(Levels(strategy), batch_size=None, shuffle=False) for _ in range(2)]
    made.fit(task, *loaders, ckpt_path=ckpt_path)
    return folder / "checkpoints" / "last.ckpt"


def scored(strategy: Any) -> dict[str, float]:
    """Validate on two batches; return the figures."""
    torch.manual_seed(0)
    task = speech(stack(LinearAttention, causal=False)).double()
    batches = [batch(task, step, place(strategy)[1]) for step in range(2)]
    (figures,) = trainer(strategy).validate(task, DataLoader(batches, batch_size=None), verbose=False)
    return dict(figures)


def with_dropout(rank: int) -> Tensor:
    """Train with dropout from another random state on each process; return what each has of the embedding."""
    torch.manual_seed(rank)
    task = LanguageModel(stack(LinearAttention, dropout=0.5), V)
    torch.manual_seed(10 + rank)
    batches = DataLoader([batch(task, step, 0) for step in range(2)], batch_size=None)
    trainer(HEADS(), max_steps=2, enable_checkpointing=False).fit(task, batches)
    return next(task.embedding.parameters()).full_tensor().detach()  # type: ignore[attr-defined]


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


def resumed() -> list[tuple[str, Any, Any]]:
    """The name, the strategy and the kind of attention of runs that are resumed."""
    runs = []
    for name, strategy in {"DDP": DDPStrategy, "sharded": ShardedStrategy, "parts": PARTS, "heads": HEADS}.items():
        runs += [
            (f"{name}, {kind}", strategy, make)
            for kind, make in OF_A_KIND.items()
            if name != "heads" or make(E, H).divides_heads
        ]
    return runs


def carry(
    folder: Path, strategy: Any, *more: pl.Callback, kind: Any = SHARED_UV, ckpt_path: Path | None = None, **kept: int
) -> Path:
    """Train for two steps with a memory, of which each process has its own; return the last checkpoint."""
    torch.manual_seed(0)
    callbacks = [MemoryCarry(), LastCheckpoint(every_n_train_steps=1, **kept), *more]
    made = trainer(strategy, default_root_dir=folder, max_steps=2, callbacks=callbacks, plugins=[AtomicCheckpointIO()])
    task = language(kind).double()
    steps = [0, 1] if ckpt_path is None else [1, 1]  # a loader that can't resume begins anew
    batches = [batch(task, step, place(strategy)[1]) for step in steps]
    made.fit(task, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return folder / "checkpoints" / "last.ckpt"


def failed(folder: Path) -> list[str]:
    """What this process says where the disk of one is full."""
    messages = []
    for rank in range(P):
        with pytest.raises(OSError, match="could not be written") as caught:
            carry(folder / str(rank), PARTS(), FullOn(rank, 1))
        messages.append(str(caught.value))
    return messages


SHARDED = "ModelParallelStrategy"


def work(rank: int, folder: Path, cases: str, size: int) -> None:
    torch.set_num_threads(1)
    both = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
    both |= {"GROUP_RANK": 0, "MASTER_PORT": 0}
    os.environ.update({name: str(n) for name, n in both.items()}, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{cases}", rank=rank, world_size=size)
    found: dict[str, Any] = {name: train(make, rank) for name, make in CASES.get(cases, {}).items()}
    streams, divided = size // P, DIVIDED_HEADS if cases == "quick" else MORE_DIVIDED_HEADS | OF_DIVIDED_HEADS
    found |= {f"heads of {name}": train(make, rank, streams=streams, heads=P) for name, make in divided.items()}
    if cases == "quick":
        run(folder / "whole", SHARDED)
        run(folder / "parts", PARTS())
        with mock.patch("lit_effattn.checkpoints.io.read_whole", None):
            run(folder / "from parts", PARTS(), folder / "parts" / "checkpoints" / "step_00000001.ckpt")
        carry(folder / "memory whole", SHARDED)
        if rank == 0:  # of a process that was killed, and had the same number
            (unfinished(folder / "memory parts" / "checkpoints" / "last.ckpt") / "left").mkdir(parents=True)
        found["mine"] = read_local(carry(folder / "memory parts", PARTS()))["memory_carry"]
        found["failed"] = failed(folder / "failed")
        found["scored"] = scored(HEADS())
        found["with dropout"] = with_dropout(rank)
        run(folder / "heads", HEADS())
        run(folder / "from heads", HEADS(), folder / "heads" / "checkpoints" / "step_00000001.ckpt")
        carry(folder / "memory heads", HEADS(), kind=LinearAttention, keep=2, keep_every_n_train_steps=1)
        first = folder / "memory heads" / "checkpoints" / "step_00000001.ckpt"
        carry(folder / "memory from heads", HEADS(), kind=LinearAttention, ckpt_path=first)
        for before in ("whole", "one"):
            run(folder / f"from {before}", SHARDED, folder / before / "checkpoints" / "step_00000001.ckpt")
    if cases == "every":
        found |= {f"DDP, {name}": train(make, rank, ddp=True) for name, make in OF_DDP.items()}
        for name, strategy, kind in resumed():
            whole = run(folder / name / "whole", strategy(), kind=kind)
            run(folder / name / "resumed", strategy(), whole.with_name("step_00000001.ckpt"), kind)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def spawned(folder: Path, cases: str, size: int = P) -> list[dict[str, Any]]:
    """Return what each process found."""
    in_processes(work, folder, cases, size, n=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def assert_like_one(name: str, make: Callable[[], Task], found: list[dict[str, Any]], streams: int = P) -> None:
    losses, parameters = train(make, None, streams=streams)
    for rank, (own, whole) in enumerate(of_rank[name] for of_rank in found):
        expected = losses[rank * streams // len(found) :: streams], dict(parameters)
        torch.testing.assert_close((own, whole), expected, msg=lambda message: f"{name}: {message}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each process found; beside it the runs of one process and of two."""
    run(folder / "one", "auto")
    return spawned(folder, "quick")


def test_losses_and_parameters_are_those_of_one_process(found: list[dict[str, Any]]):
    for name, make in QUICK.items():
        assert_like_one(name, make, found)


def test_processes_that_divide_heads_train_as_one(found: list[dict[str, Any]]):
    for name, make in DIVIDED_HEADS.items():
        assert_like_one(f"heads of {name}", make, found, streams=1)


@pytest.mark.exhaustive
def test_every_kind_and_task(folder: Path):
    found = spawned(folder, "every")
    for name, make in EVERY.items():
        assert_like_one(name, make, found)
    for name, make in (MORE_DIVIDED_HEADS | OF_DIVIDED_HEADS).items():
        assert_like_one(f"heads of {name}", make, found, streams=1)
    for name, make in OF_DDP.items():
        assert_like_one(f"DDP, {name}", make, found)
    for name, *_ in resumed():
        whole, again = (folder / name / part / "checkpoints" / "last.ckpt" for part in ("whole", "resumed"))
        assert_same_end(whole, again)


@pytest.mark.exhaustive
def test_four_processes_divide_heads_and_batches(folder: Path):
    found = spawned(folder, "2 x 2", 2 * P)
    for name, make in (MORE_DIVIDED_HEADS | OF_DIVIDED_HEADS).items():
        assert_like_one(f"heads of {name}", make, found)


@pytest.mark.parametrize(("name", "more"), [("whole", ["from one"]), ("heads", [])])
def test_a_run_is_that_of_one_process_and_resumes_exactly(name: str, more: list[str], folder: Path, found: list[Any]):
    """Also where the run was begun by another number of processes."""
    paths = {run: folder / run / "checkpoints" / "last.ckpt" for run in ("one", name, f"from {name}", *more)}
    assert_same_end(paths[name], paths[f"from {name}"])
    one = read_checkpoint(paths["one"])
    assert one["global_step"] == 2
    for other in (read_checkpoint(paths[run]) for run in (name, *more)):
        assert other.keys() == one.keys()
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(other[part], one[part])
    assert len(list((folder / name / "samples").iterdir())) == 2


def test_processes_that_divide_heads_drop_alike(found: list[dict[str, Any]]):
    first, second = (of_rank["with dropout"] for of_rank in found)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_processes_that_divide_heads_count_a_batch_once(found: list[dict[str, Any]]):
    one = scored("auto")
    assert one["val/utterances"] == 4
    for of_rank in found:
        assert of_rank["scored"] == pytest.approx(one)


def test_a_memory_of_divided_heads_is_saved_whole(folder: Path, found: list[Any]):
    heads, resumed = (folder / f"memory {name}" / "checkpoints" / "last.ckpt" for name in ("heads", "from heads"))
    assert_same_end(heads, resumed)
    one = carry(folder / "memory of one", "auto", kind=LinearAttention)
    torch.testing.assert_close(read_checkpoint(heads)["memory_carry"], read_checkpoint(one)["memory_carry"])


def leaves(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a checkpoint, and the rest."""
    found = {keystr(key): leaf for key, leaf in tree_flatten_with_path(read_checkpoint(path))[0]}
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}
    return tensors, {name: leaf for name, leaf in found.items() if name not in tensors}


def test_parts_put_together_are_the_file_of_one_process(folder: Path, found: list[dict[str, Any]]):
    names = ["common.pt", "part_00000.pt", "part_00001.pt"]
    for name in ("", "memory "):
        whole, parts = (folder / f"{name}{kind}" / "checkpoints" for kind in ("whole", "parts"))
        files = sorted(path.name for path in whole.iterdir())
        assert sorted(path.name for path in parts.iterdir()) == files
        for file in files:
            (tensors, rest), (others, others_rest) = leaves(whole / file), leaves(parts / file)
            assert same(tensors, others)
            assert rest == others_rest
            assert sorted(path.name for path in (parts / file).iterdir()) == names


def test_each_process_keeps_its_own_memory(folder: Path, found: list[dict[str, Any]]):
    memories = read_checkpoint(folder / "memory parts" / "checkpoints" / "last.ckpt")["memory_carry"]
    assert len(memories) == P
    assert repr(memories[0]) != repr(memories[1])
    for rank, of_rank in enumerate(found):
        assert repr(of_rank["mine"]) == repr([memories[r] if r == rank else None for r in range(P)])


def test_a_run_resumes_from_parts_with_any_number_of_processes(folder: Path, found: list[dict[str, Any]]):
    parts = folder / "parts" / "checkpoints"
    one = run(folder / "one from parts", "auto", parts / "step_00000001.ckpt")
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
        for message in (of_rank["failed"][rank] for of_rank in found):
            assert re.search(r"last\.ckpt could not be written: No space left on device; .* still intact", message)
        assert f"(process {rank})" in found[1 - rank]["failed"][rank]


# -------------------------------------------------------------------------------------------------------- the refusals


def test_what_is_not_supported_is_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=0 must be at least 1"):
        ShardedStrategy(tensor_parallel_size=0)
    with pytest.raises(ValueError, match=r"save_distributed_checkpoint=True with tensor_parallel_size=2 .* leave it"):
        PARTS(tensor_parallel_size=2)
    for options, message in (
        ({"data_parallel_size": 3}, "data_parallel_size=3 is not .* 2, divided by tensor_parallel_size=1; leave it"),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2},
            "data_parallel_size=2 is not .*_parallel_size=2; leave it out",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the number of processes, 2; give"),
    ):
        strategy = ShardedStrategy(**options)
        strategy.parallel_devices = [torch.device("cpu")] * P
        with pytest.raises(ValueError, match=message):
            strategy.setup_environment()
    task = language(PERFORMER)
    task._device_mesh, task._trainer = object(), SimpleNamespace(strategy=ShardedStrategy())
    task._trainer.callbacks = [EMAWeightAveraging()]
    with pytest.raises(ValueError, match=r"EMAWeightAveraging copies the model, which strategy=ModelParallelStrategy"):
        task.configure_model()
    task._trainer.strategy = ModelParallelStrategy()
    with pytest.raises(ValueError, match=r"strategy=ModelParallelStrategy: .* use lit_effattn.distributed"):
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
    assert made.settings["trainer"]["strategy"]["class_path"] == "lit_effattn.distributed.sharding.ShardedStrategy"
