"""Predictions of intermediate layers and of later tokens, as Al-Rfou et al. 2018 train with them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lit_effattn import LSTM, Transformer
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.tasks import LanguageModel
from tests.callbacks.tiny import trainer
from tests.tasks.test_language import V, batch, model

OPTIONS = {"intermediate_losses": True, "n_targets": 3, "target_weight": 0.25}


def by_hand(made: LanguageModel, given: TokenBatch, layers: list[int]) -> float:
    """Sum the losses of `layers`: each position, and each of the next three tokens, with the heads of their own."""
    total = 0.0
    for layer in layers:
        stack = Transformer(8, 2, layer + 1, init="pytorch").double().eval()
        stack.load_state_dict(made.backbone.state_dict(), strict=False)
        heads = list(made.further.heads[layer])
        if layer == len(made.backbone.blocks) - 1:
            heads = [made.head, *heads]
        assert len(heads) == 3
        h, _ = stack(made.embedding(given.inputs), None, given.lengths)
        for ahead, (head, weight) in enumerate(zip(heads, (1, 0.25, 0.25), strict=True)):
            costs = [
                F.cross_entropy(F.linear(h[row, t], head.proj.weight, head.proj.bias), targets[t + ahead])
                for row, targets in enumerate(given.targets)
                for t in range(len(targets) - ahead)
                if targets[t + ahead] != IGNORE
            ]
            total += weight * torch.stack(costs).mean().item()
    return total


def test_every_layer_predicts_the_next_tokens_from_every_position(monkeypatch: pytest.MonkeyPatch):
    made, given = model(**OPTIONS), batch()
    logged: dict[str, float] = {}
    monkeypatch.setattr(made, "log", lambda name, value, **_: logged.update({name: float(value)}))
    loss = made.training_step(given)
    assert loss.item() == pytest.approx(by_hand(made, given, [0, 1]))
    h, _ = made.backbone(made.embedding(given.inputs), None, given.lengths)
    scored = given.targets != IGNORE
    assert logged["train/loss"] == pytest.approx(
        F.cross_entropy(made.head.proj(h)[scored], given.targets[scored]).item()
    )
    assert logged["train/auxiliary_loss/FurtherPredictions"] == pytest.approx(loss.item() - logged["train/loss"])

    made.further.follow(1, 4)  # l / (2 n) = 1/4 of training is done
    loss = made.training_step(given)
    assert loss.item() == pytest.approx(by_hand(made, given, [1]))
    loss.backward()
    assert all(p.grad is not None for p in made.parameters())
    assert not any(p.grad.any() for p in made.further.heads[0].parameters())


def test_a_layer_stops_when_its_share_of_training_is_done(tmp_path: Path):
    """Of 3 layers in 12 steps: layer 1 stops after 2, layer 2 after 4; then the last is alone."""
    seen = []

    class Watched(LanguageModel):
        def on_before_optimizer_step(self, optimizer):
            seen.append(self.further.layer_weights.tolist())

    made = Watched(Transformer(8, 2, 3), V, intermediate_losses=True)
    data = DataLoader([batch()] * 6, batch_size=None)
    trainer(tmp_path, [], max_epochs=4, accumulate_grad_batches=2).fit(made, data)
    assert seen == [[1, 1, 1]] * 2 + [[0, 1, 1]] * 2 + [[0, 0, 1]] * 8


def test_scores_samples_and_parameters_are_those_of_the_model_without(tmp_path: Path):
    """The heads of auxiliary losses are drawn after the rest, and are not used but in training."""
    made, plain, given = model(**OPTIONS), model(), batch()
    extra = {name for name in made.state_dict() if name not in plain.state_dict()}
    assert {name.split(".")[0] for name in extra} == {"further"}
    assert len(extra) == 2 * 5  # a matrix and a bias: two layers of three targets, but the last layer's first
    scores = [
        trainer(tmp_path, []).test(m, DataLoader([given], batch_size=None), verbose=False)[0] for m in (made, plain)
    ]
    assert scores[0] == scores[1]
    assert torch.equal(made.sample(given.inputs, 4), plain.sample(given.inputs, 4))


def test_later_targets_alone_need_no_layers():
    made, given = LanguageModel(LSTM(8, 1), V, n_targets=2), TokenBatch(torch.tensor([[1]]), torch.tensor([[2]]))
    loss = made.training_step(given)
    assert loss.item() == pytest.approx(made(given).item())  # one position has no second target
    loss.backward()


def test_several_sequences_in_a_row_are_refused():
    """The second target of a sequence's last position is of the next sequence."""
    made, tokens = LanguageModel(LSTM(8, 1), V, n_targets=2), torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"n_targets and intermediate_losses do not support .*documents packed"):
        made.objective(TokenBatch(tokens, tokens, starts=tokens > 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_targets": 0}, "n_targets=0"),
        ({"n_targets": 2, "target_weight": -1.0}, "target_weight=-1.0"),
        ({"intermediate_losses": True}, "intermediate_losses=True needs a Transformer, not LSTM"),
    ],
)
def test_wrong_settings_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LanguageModel(LSTM(8, 1), V, **options)
