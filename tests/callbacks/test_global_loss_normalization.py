"""The update of ragged batches does not depend on how they are divided."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lit_effattn import LSTM, Transformer
from lit_effattn.attention import SoftmaxAttention, SoftmaxCrossAttention
from lit_effattn.callbacks import GlobalLossNormalization
from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.tasks import LanguageModel, PixelModel, SequenceClassifier, SequenceToSequence, SpeechRecognizer
from lit_effattn.tasks.base import Task
from tests.callbacks.tiny import Tiny, loader, trainer

V = 7
SCORED = (9, 1, 4, 2)  # targets of each row


def rows(n: int = 4) -> list[TokenBatch]:
    """Batches of one row, of different numbers of scored targets."""
    tokens = torch.randint(V, (n, 10), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    for row, scored in zip(targets, SCORED, strict=True):
        row[scored:] = IGNORE
    return [TokenBatch(tokens[i : i + 1, :-1], targets[i : i + 1]) for i in range(n)]


def joined(*batches: Any) -> Any:
    return type(batches[0])(*(torch.cat(x) if isinstance(x[0], Tensor) else x[0] for x in zip(*batches, strict=True)))


def trained(folder: Path, batches: list[TokenBatch], *callbacks: Any, **options: Any) -> Tensor:
    """Return all parameters after a step of SGD."""
    torch.manual_seed(0)
    model = LanguageModel(LSTM(8, 1), V, optimizer=partial(torch.optim.SGD, lr=1.0)).double()
    options = {"max_steps": 1, "gradient_clip_val": 0.2, **options}
    trainer(folder, callbacks, **options).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (3, 1)])
def test_accumulated_batches_give_the_update_of_one_batch(tmp_path: Path, sizes: tuple[int, ...]):
    parts = [joined(*part) for part in torch.utils.data.random_split(rows(), sizes)]  # type: ignore[arg-type]
    whole = trained(tmp_path, [joined(*rows())])
    options = {"accumulate_grad_batches": len(parts)}
    torch.testing.assert_close(trained(tmp_path, parts, GlobalLossNormalization(), **options), whole)
    assert (trained(tmp_path, parts, **options) - whole).abs().max() > 1e-3  # Lightning's mean of means


def test_a_run_that_fails_leaves_the_model_as_it_was(tmp_path: Path):
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("failed")

    model = LanguageModel(LSTM(8, 1), V)
    with pytest.raises(RuntimeError, match="failed"):
        trainer(tmp_path, [GlobalLossNormalization(), Fails()], max_steps=2).fit(
            model, DataLoader(rows(), batch_size=None)
        )
    assert model.scored_items is None


def test_a_second_step_and_a_short_last_one_count_afresh(tmp_path: Path):
    first, second, third, fourth = rows()
    options: Any = {"max_steps": 2, "max_epochs": 1}
    whole = trained(tmp_path, [joined(first, second, third), fourth], **options)
    parts = trained(tmp_path, rows(), GlobalLossNormalization(), accumulate_grad_batches=3, **options)
    torch.testing.assert_close(parts, whole)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_give_the_update_of_one(tmp_path: Path):
    whole = trained(tmp_path, [joined(*rows())])
    strategy = DDPStrategy(start_method="spawn")  # forked from a server, processes of Lightning share the weights
    options: Any = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 2, "plugins": None}
    torch.testing.assert_close(trained(tmp_path, rows(), GlobalLossNormalization(), **options), whole)


def speech(*phones: int) -> SpeechBatch:
    n = torch.tensor([len(phones)])
    features = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(len(phones))).double()
    return SpeechBatch(features, torch.tensor([20]), torch.tensor([[*phones, 0, 0, 0]])[:, :3], n, None)  # type: ignore[arg-type]


def pair(scored: int) -> PairBatch:
    row = rows()[SCORED.index(scored)]
    n = torch.tensor([9])
    return PairBatch(row.inputs, n, row.inputs, row.targets, n, [], [])


def recognizer() -> Task:
    return SpeechRecognizer(Transformer(8, 2, 1, causal=False), 4, ("a", "b"))


def translator() -> Task:
    stack = partial(Transformer, 8, 2, 1, attention=SoftmaxAttention)
    return SequenceToSequence(EncoderDecoder(stack(causal=False), stack(cross_attention=SoftmaxCrossAttention)), V, V)


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda: LanguageModel(LSTM(8, 1), V), rows()[0], rows()[1]),
        (recognizer, speech(1, 2, 1), speech(2)),
        (recognizer, speech(1, 2, 1)._replace(lengths=torch.tensor([2])), speech(2)),  # it has too few frames
        (translator, pair(9), pair(1)),
        (
            lambda: SequenceClassifier(LSTM(8, 1), ("a", "b", "c"), vocab_size=V),
            LabelledBatch(torch.ones(3, 4).long(), torch.tensor([0, 1, 2])),
            LabelledBatch(torch.zeros(1, 4).long(), torch.tensor([1])),
        ),
        (lambda: PixelModel(LSTM(8, 1), (2, 2, 1)), torch.ones(3, 4).long(), torch.full((1, 4), 99)),
    ],
    ids=["text", "speech", "impossible", "pairs", "classes", "pixels"],
)
def test_the_loss_of_two_batches_is_the_mean_by_scored_items(make: Any, one: Any, other: Any):
    torch.manual_seed(0)
    model = make().double()
    a, b = model.objective(one), model.objective(other)
    both = model.objective(torch.cat([one, other]) if isinstance(one, Tensor) else joined(one, other))
    assert a.n_scored != b.n_scored
    torch.testing.assert_close(both.loss, (a.n_scored * a.loss + b.n_scored * b.loss) / (a.n_scored + b.n_scored))


class Uncounted(LanguageModel):
    def objective(self, batch: TokenBatch, memory: Any = None) -> Any:
        return super().objective(batch, memory)._replace(n_scored=None)


def test_a_model_that_counts_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="Tiny is not a Task of lit_effattn"):
        trainer(tmp_path, [GlobalLossNormalization()], max_steps=1).fit(Tiny(), loader())
    with pytest.raises(ValueError, match=r"Uncounted\.objective returns no `n_scored`"):
        trainer(tmp_path, [GlobalLossNormalization()], max_steps=1).fit(
            Uncounted(LSTM(8, 1), V),
            DataLoader(rows(), batch_size=None),  # type: ignore[arg-type]
        )
