import copy
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lit_effattn import Transformer
from lit_effattn import attention as attentions
from lit_effattn.attention import LinearAttention, TransformerXLAttention
from lit_effattn.callbacks import Compile, MemoryCarry
from lit_effattn.datamodules.common.tokens import TokenBatch
from lit_effattn.tasks import LanguageModel, PixelModel, Task
from tests.callbacks.test_memory_carry import ROWS, SEGMENT, V, loader
from tests.callbacks.tiny import Tiny, trainer
from tests.tasks.test_speech import model as recognizer
from tests.tasks.test_speech import speech

_step = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _is_kind(name: str) -> bool:
    kind = getattr(attentions, name)
    return isinstance(kind, type) and issubclass(kind, attentions.Attention) and not inspect.isabstract(kind)


def text(attention: Any = LinearAttention, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    backbone = Transformer(8, 2, 1, attention=attention, positions=None, **options)
    return LanguageModel(backbone, V, embedding_std=1.0, optimizer=_step).double()


def images(n_dims: int = 6) -> PixelModel:
    torch.manual_seed(1)
    backbone = Transformer(8, 2, 1, attention=LinearAttention)
    return PixelModel(backbone, (n_dims, 1, 1), n_levels=5, optimizer=_step).double()


def weights(model: pl.LightningModule) -> list[Tensor]:
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    "make",
    [partial(text, partial(TransformerXLAttention, mem_len=3)), partial(text, gradient_checkpointing=True)],
    ids=["xl", "checkpointed"],
)
def test_steps_that_carry_memory_are_compiled_once_and_learn_the_same(make: Any, tmp_path: Path):
    """Validation, of other rows and lengths, and generation are not compiled."""
    plain, compiled = make(), make()
    for model, callbacks in ((plain, []), (compiled, [Compile("eager")])):
        fitting = trainer(tmp_path, [MemoryCarry(), *callbacks], max_epochs=2, val_check_interval=2)
        other = TokenBatch(*(torch.zeros(ROWS - 1, SEGMENT + 1, dtype=torch.long) for _ in range(2)))
        fitting.fit(model, loader(5), DataLoader([other], batch_size=None))
        model.sample(torch.zeros(1, 1, dtype=torch.long), 2)
    assert graphs() == 1
    torch.testing.assert_close(weights(compiled), weights(plain))
    assert compiled.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [name for name in attentions.__all__ if _is_kind(name)])
def test_a_step_of_every_kind_is_compiled(kind: str, tmp_path: Path):
    options = {
        "TransformerXLAttention": {"mem_len": 3},
        "SoftmaxAttention": {"window": 3},
        "ShawAttention": {"window": 3},
    }
    plain, compiled = (text(partial(getattr(attentions, kind), **options.get(kind, {}))) for _ in range(2))
    carry = [] if kind in ("LSHAttention", "SparseAttention") else [MemoryCarry()]  # their states grow
    for model, callbacks in ((plain, []), (compiled, [Compile("eager")])):
        trainer(tmp_path, [*carry, *callbacks], max_epochs=1).fit(model, loader(3))
    assert counters["stats"]["unique_graphs"] >= 1
    torch.testing.assert_close(weights(compiled), weights(plain))


def test_batches_of_other_sizes_are_compiled_once_more(tmp_path: Path):
    sizes = (4, 4, 3, 5, 7, 2)
    batches = [torch.randint(5, (rows, 6)) for rows in sizes]
    plain, compiled = images(), images()
    for model, callbacks in ((plain, []), (compiled, [Compile("eager")])):
        trainer(tmp_path, callbacks, max_epochs=2).fit(model, DataLoader(batches, batch_size=None))
    assert graphs() == 2
    torch.testing.assert_close(weights(compiled), weights(plain))
    torch._dynamo.reset()
    compiled.run_objective(batches[0])
    assert graphs() == 2  # after the run nothing is compiled


def test_speech_is_compiled_around_its_loss():
    plain = recognizer().float().train()
    compiled = copy.deepcopy(plain)
    compiled.compile_objective("eager")
    for lengths in ((23, 17, 5), (30, 19, 8), (41, 9, 3)):
        batch = speech(lengths, (3, 2, 1))
        batch = batch._replace(features=batch.features.float())
        for model in (plain, compiled):
            model.zero_grad()
            model.training_step(batch).backward()
        torch.testing.assert_close(
            [p.grad for p in compiled.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0
        )
    assert counters["stats"]["unique_graphs"] <= 4  # two, and again for other lengths


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_resumed_with_it_or_without(first: bool, tmp_path: Path):
    """An epoch, its checkpoint, and the next: as if nothing had happened."""
    at_once, resumed = text(), text()
    trainer(tmp_path, [MemoryCarry()], max_epochs=2).fit(at_once, loader(3))

    def callbacks(compiled: bool) -> list[pl.Callback]:
        return [MemoryCarry(), *([Compile("eager")] if compiled else [])]

    before = trainer(tmp_path, callbacks(first), max_epochs=1, enable_checkpointing=False)
    before.fit(text(), loader(3))
    before.save_checkpoint(tmp_path / "last.ckpt")
    after = trainer(tmp_path, callbacks(not first), max_epochs=2)
    after.fit(resumed, loader(3), ckpt_path=tmp_path / "last.ckpt")
    assert graphs() == 1
    torch.testing.assert_close(weights(resumed), weights(at_once))


def test_a_copy_computes_with_its_own_weights():
    model = text()
    model.compile_objective("eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    tokens = torch.randint(V, (ROWS, SEGMENT))
    batch = TokenBatch(tokens, tokens)
    for one in (model, twin):
        torch.testing.assert_close(one.run_objective(batch).loss, one.objective(batch).loss)
    assert graphs() > 0


def test_values_are_checked_all_the_same():
    model = text()
    model.compile_objective("eager")
    with pytest.raises(ValueError, match=f"the data hold token {V}"):
        model.training_step(TokenBatch(torch.full((1, 2), V), torch.zeros(1, 2, dtype=torch.long)))


def test_only_training_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    test = DataLoader([torch.randint(5, (2, 6))], batch_size=None)
    trainer(tmp_path, [Compile()]).test(images(), test, verbose=False)


def test_what_can_not_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = trainer(tmp_path, [])
    with pytest.raises(ValueError, match="Tiny has no `compile_objective`"):
        Compile("eager").setup(run, Tiny(), "fit")
    with pytest.raises(ValueError, match="Task can't be compiled: it defines no `objective`"):
        Compile("eager").setup(run, Task(None, None), "fit")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ValueError, match=r"needs PyTorch 2\.14 or newer, and this is 2\.11\.0\+cu130"):
        Compile("eager").setup(run, images(), "fit")


def test_what_inductor_needs_is_missed_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fitting = trainer(tmp_path, [Compile()])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"Compile needs a C\+\+ compiler on the CPU, and there is no 'no-such-compiler'"
    ):
        fitting.fit(images())
    Compile("eager").setup(fitting, images(), "fit")  # needs neither
