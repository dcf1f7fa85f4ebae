import math
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset

from lit_effattn import Transformer, sequence
from lit_effattn.attention import InfiniteAttention, LinearAttention, SoftmaxAttention, TransformerXLAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.tasks import LanguageModel, PixelModel
from tests.callbacks.tiny import trainer

V, ROWS, SEGMENT = 7, 3, 4
STICKY = partial(InfiniteAttention, mem_len=3, segment_len=4, n_basis=6, widths=(0.1,), n_samples=5, sticky=True)


class Streams(Dataset):
    """ROWS contiguous streams, in segments; a new document where `fresh` says so."""

    def __init__(self, n_segments: int, seed: int = 0, fresh: tuple[tuple[int, int], ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(V, (ROWS, n_segments * SEGMENT + 1), generator=generator)
        self.n_segments = n_segments
        self.fresh = torch.zeros(n_segments, ROWS, dtype=torch.bool)
        self.fresh[0] = True
        for segment, row in fresh:
            self.fresh[segment, row] = True

    def __len__(self) -> int:
        return self.n_segments

    def __getitem__(self, i: int) -> TokenBatch:
        piece = self.tokens[:, i * SEGMENT : (i + 1) * SEGMENT + 1]
        return TokenBatch(piece[:, :-1], piece[:, 1:], None, self.fresh[i])


def loader(n_segments: int, **options: Any) -> DataLoader:
    return DataLoader(Streams(n_segments, **options), batch_size=None, generator=torch.Generator())


_still = partial(torch.optim.SGD, lr=0.0)


def model(attention: Any = LinearAttention, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    backbone = Transformer(8, 2, 2, attention=attention, positions=None, init="pytorch")
    return LanguageModel(backbone, V, embedding_std=1.0, optimizer=_still, **options).double()


class Spy(pl.Callback):
    """Takes down each training loss, and the memory that each batch began with."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.before: list[Any] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.before.append(sequence.map_tensors(torch.clone, pl_module.memory))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        assert not any(t.requires_grad for t in sequence.tensors(pl_module.memory))


def nats(made: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """−log p of tokens[1:], in one pass over the whole row: (n + 1) -> (n)."""
    hidden, _ = made.backbone(made.embedding(tokens[None, :-1]))
    return -made.head.log_probs(hidden)[0].gather(-1, tokens[1:, None])[:, 0]


def test_segments_with_carried_memory_cost_what_one_pass_over_the_stream_costs(tmp_path):
    made, spy, data = model(), Spy(), loader(6, fresh=((2, 1), (5, 0)))
    trainer(tmp_path, [MemoryCarry(), spy], max_epochs=2).fit(made, data)
    made = made.train()
    tokens, expected = data.dataset.tokens, torch.zeros(6).double()
    with torch.no_grad():
        for row, borders in enumerate(([0, 5, 6], [0, 2, 6], [0, 6])):
            for a, b in pairwise(borders):
                costs = nats(made, tokens[row, a * SEGMENT : b * SEGMENT + 1])
                expected[a:b] += costs.view(b - a, SEGMENT).mean(1) / ROWS
    # The second epoch begins with empty memories again.
    torch.testing.assert_close(torch.tensor(spy.losses, dtype=torch.double), expected.repeat(2))


def test_without_it_every_segment_is_alone(tmp_path):
    made, data = model(), loader(3)
    losses = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            losses.append(float(outputs["loss"]))
            assert pl_module.memory is None

    trainer(tmp_path, [Losses()], max_epochs=1).fit(made, data)
    with torch.no_grad():
        alone = [
            torch.stack([nats(made, row[i * SEGMENT : (i + 1) * SEGMENT + 1]).mean() for row in data.dataset.tokens])
            for i in range(3)
        ]
    torch.testing.assert_close(torch.tensor(losses, dtype=torch.double), torch.stack([a.mean() for a in alone]))
    for stage in ("fit", "test"):
        with pytest.warns(UserWarning, match="TransformerXLAttention begins each with an empty memory"):
            getattr(trainer(tmp_path, [], max_epochs=1), stage)(model(partial(TransformerXLAttention, mem_len=4)), data)


def test_a_validation_in_mid_epoch_leaves_the_memory_of_training_alone(tmp_path):
    runs = []
    for interval in (None, 2):
        spy = Spy()
        options = {} if interval is None else {"val_check_interval": interval}
        fit = trainer(tmp_path / str(interval), [MemoryCarry(), spy], max_epochs=1, **options)
        fit.fit(model(), loader(6), None if interval is None else loader(3, seed=9))
        runs.append(spy)
    assert runs[0].losses == runs[1].losses
    for a, b in zip(runs[0].before, runs[1].before, strict=True):
        torch.testing.assert_close(list(sequence.tensors(a)), list(sequence.tensors(b)), rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "attention"), [("validate", LinearAttention), ("test", STICKY)])
def test_evaluation_scores_what_one_pass_scores(tmp_path, stage: str, attention: Any):
    made, data = model(attention), loader(5, seed=3)
    with torch.no_grad():
        mean = torch.stack([nats(made.eval(), row) for row in data.dataset.tokens]).mean()
    (result,) = getattr(trainer(tmp_path, [MemoryCarry()]), stage)(made, data, verbose=False)
    name = {"validate": "val", "test": "test"}[stage]
    assert result[f"{name}/perplexity"] == pytest.approx(mean.exp().item(), rel=1e-6)
    (alone,) = getattr(trainer(tmp_path, [MemoryCarry(evaluation=False)]), stage)(made, data, verbose=False)
    assert abs(alone[f"{name}/perplexity"] - mean.exp().item()) > 1e-3
    assert made.memory is None


@pytest.mark.parametrize(("saved_first", "attention"), [(True, LinearAttention), (False, STICKY)])
def test_the_memory_is_in_the_checkpoint_and_taken_up_again(tmp_path, attention: Any, saved_first: bool):
    straight, second = Spy(), Spy()
    path = tmp_path / "half.ckpt"
    callbacks = [MemoryCarry(), straight]
    callbacks.insert(0 if saved_first else 2, Save(3, path))
    trainer(tmp_path, callbacks, max_epochs=1).fit(model(attention), loader(6))
    packed = torch.load(path, weights_only=True)["memory_carry"]
    assert len(packed) == 1
    rest = Rest(loader(6), 3)
    trainer(tmp_path, [MemoryCarry(), second], max_epochs=1).fit(model(attention), rest, ckpt_path=path)
    assert second.losses == straight.losses[3:]


class Save(pl.Callback):
    """Saves a checkpoint in mid-epoch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Rest:
    """A loader that resumes behind what has been seen."""

    def __init__(self, loader: DataLoader, start: int) -> None:
        self.loader, self.start = loader, start

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        yield from list(self.loader)[self.start :]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def test_memories_of_another_number_of_processes_start_empty(tmp_path):
    carry, made = MemoryCarry(), model()
    trainer(tmp_path, [carry], max_steps=2).fit(made, loader(6))
    fitting = trainer(tmp_path, [])
    fitting.state.fn = TrainerFn.FITTING
    carry.setup(fitting, made, "fit")
    with pytest.warns(UserWarning, match="of 2 processes, this run has 1"):
        carry.on_load_checkpoint(fitting, made, {"memory_carry": [None, None]})
    carry.on_train_start(fitting, made)
    assert made.memory is None


def test_evaluation_neither_takes_up_the_memories_of_a_checkpoint_nor_complains_about_them(tmp_path, recwarn):
    path = tmp_path / "two.ckpt"
    made, fit = model(), trainer(tmp_path, [MemoryCarry()], max_steps=2)
    fit.fit(made, loader(6))
    fit.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "memory_carry": 2 * checkpoint["memory_carry"]}, path)  # as of two processes
    recwarn.clear()
    fresh = model()
    trainer(tmp_path, [MemoryCarry()]).test(fresh, loader(2), ckpt_path=path, verbose=False)
    assert not [w for w in recwarn if "memories" in str(w.message)]
    assert fresh.memory is None


@pytest.mark.parametrize(("stage", "saved_first"), [("train", True), ("train", False), ("validation", True)], ids=str)
def test_an_exception_leaves_no_memory_in_the_model_and_that_of_training_for_a_checkpoint(
    tmp_path, stage: str, saved_first: bool
):
    class Raise(pl.Callback):
        def on_train_batch_end(self, trainer, *_: Any) -> None:
            if stage == "train" and trainer.global_step == 2:
                raise RuntimeError("on purpose")

        def on_validation_batch_end(self, trainer, *_: Any) -> None:
            if stage == "validation":
                raise RuntimeError("on purpose")

        def on_exception(self, trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    carry, made, data = MemoryCarry(), model(), loader(6)
    callbacks = [Raise(), carry] if saved_first else [carry, Raise()]
    fit = trainer(tmp_path, callbacks, max_epochs=1, val_check_interval=2, num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit.fit(made, data, loader(3, seed=9))
    assert made.memory is None
    (packed,) = torch.load(tmp_path / "x.ckpt", weights_only=True)["memory_carry"]
    found = sequence.unpack(packed, made.backbone.initial_state(1))
    _, expected = made.backbone(made.embedding(data.dataset.tokens[:, : 2 * SEGMENT]))
    for a, b in zip(sequence.tensors(found), sequence.tensors(expected), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpoint_of_an_epoch_s_start_has_an_empty_memory_and_is_resumed(tmp_path):
    class SaveAtStart(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}-{batch_idx}.ckpt")

    trainer(tmp_path, [SaveAtStart(), MemoryCarry()], max_epochs=2).fit(model(), loader(2), loader(2, seed=9))
    for name, empty in {"0-0": True, "0-1": False, "1-0": True, "1-1": False}.items():
        (packed,) = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["memory_carry"]
        assert (packed is None) == empty
    resumed = trainer(tmp_path, [MemoryCarry()], max_epochs=2)
    resumed.fit(model(), Rest(loader(2), 0), ckpt_path=tmp_path / "1-0.ckpt")
    assert resumed.global_step == 4


def test_after_training_the_model_is_called_without_its_memory(tmp_path):
    made, data = model(), loader(6)
    callbacks: list[pl.Callback] = [MemoryCarry()]
    trainer(tmp_path, callbacks, max_steps=2).fit(made, data)
    batch = data.dataset[3]
    for _ in range(2):
        assert made.memory is None
        trainer(tmp_path, callbacks).validate(made, data, verbose=False)
    with torch.no_grad():
        assert torch.equal(made(batch), made(batch))
        assert torch.equal(made(batch), model()(batch))


def test_what_grows_is_refused_with_the_option_that_bounds_it(tmp_path):
    with pytest.raises(ValueError, match="`window`"):
        trainer(tmp_path, [MemoryCarry()], max_epochs=1).fit(model(SoftmaxAttention), loader(2))
    # A sliding window bounds what evaluation remembers.
    made = model(SoftmaxAttention, eval_window=5)
    trainer(tmp_path, [MemoryCarry(training=False)], max_epochs=1).fit(made, loader(2), loader(2))


@torch.no_grad()
def test_a_window_slides_from_segment_to_segment(tmp_path):
    """Every token from the SEGMENT newest, Al-Rfou et al. 2018. Without the callback from its segment, as it warns."""
    made, data = model(SoftmaxAttention, unit="byte", eval_window=SEGMENT).eval(), loader(3)
    (found,) = trainer(tmp_path, [MemoryCarry()]).test(made, data, verbose=False)
    bits = [
        nats(made, row[max(0, t - SEGMENT) : t + 1])[-1].item() / math.log(2)
        for row in data.dataset.tokens
        for t in range(1, 3 * SEGMENT + 1)
    ]
    assert found["test/bits_per_byte"] == pytest.approx(sum(bits) / len(bits))
    with pytest.warns(UserWarning, match="eval_window=4 changes nothing"):
        trainer(tmp_path, []).test(made, data, verbose=False)


def test_what_has_no_memory_is_refused(tmp_path):
    pixels = PixelModel(Transformer(8, 2, 1), (2, 2, 1), 4)
    with pytest.raises(ValueError, match="PixelModel carries no memory"):
        trainer(tmp_path, [MemoryCarry()], max_epochs=1).fit(pixels, DataLoader(torch.zeros(2, 4)))
    two = [MemoryCarry(), MemoryCarry(evaluation=False)]
    with pytest.raises(ValueError, match="two MemoryCarry"):  # each validation would empty the training's memory
        trainer(tmp_path, two, max_epochs=1).fit(model(), loader(1))
    pairs = DataLoader([[torch.zeros(2, 4, dtype=torch.long)] * 2], batch_size=None)
    with pytest.raises(ValueError, match=r"the batch is a list without the field `fresh`.*TokenBatch"):
        trainer(tmp_path, [MemoryCarry()], max_epochs=1).fit(model(), pairs)
    with pytest.raises(ValueError, match="training=False and evaluation=False"):
        MemoryCarry(training=False, evaluation=False)


def test_batches_of_unequal_size_are_refused():
    made = model()
    batch = Streams(1)[0]
    made.memory = made.backbone.initial_state(2)
    with pytest.raises(ValueError, match=re.escape("a batch has 3 rows, but the previous one had 2")):
        MemoryCarry().on_train_batch_start(None, made, batch, 1)


def test_data_without_documents_start_afresh_with_every_batch():
    made = model()
    made.memory = sequence.map_tensors(lambda t: t + 1, made.backbone.initial_state(ROWS))
    tokens = torch.zeros(ROWS, 2, dtype=torch.long)
    with pytest.warns(UserWarning, match="MemoryCarry has no effect: `fresh` of the batch is None"):
        MemoryCarry().on_train_batch_start(None, made, TokenBatch(tokens, tokens.fill_(IGNORE)), 0)
    assert all((t == 0).all() for t in sequence.tensors(made.memory))


def test_a_skipped_step_leaves_no_older_memory(tmp_path):
    class Forget(pl.Callback):
        """What `CheckFinite` does to the memory of a step that it skips."""

        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            if trainer.global_step == 3:
                pl_module.memory = None

        def on_train_batch_end(self, trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "skipped.ckpt")

    fit = trainer(tmp_path, [MemoryCarry(), Forget()], max_epochs=1, val_check_interval=1)
    fit.fit(model(), loader(6), loader(2, seed=9))
    assert torch.load(tmp_path / "skipped.ckpt", weights_only=True)["memory_carry"] == [None]


def test_what_was_frozen_stays_so(tmp_path):
    made = model()
    made.embedding.eval()
    MemoryCarry().setup(trainer(tmp_path, []), made, "fit")
    assert not made.embedding.training
    assert made.backbone.training
