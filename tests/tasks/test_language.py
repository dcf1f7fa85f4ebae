import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lit_effattn import Transformer
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    SoftmaxAttention,
    TransformerXLAttention,
)
from lit_effattn.datamodules import CopyTask, pack
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.datamodules.text.streams import TokenStreams
from lit_effattn.datamodules.text.tokenizers import BPETokenizer, ByteTokenizer
from lit_effattn.sequence import losses
from lit_effattn.tasks import LanguageModel, samples
from lit_effattn.tasks.options import TextOptions
from tests.callbacks.tiny import trainer

V = 6


def model(attention: Any = SoftmaxAttention, vocabulary: int = V, **options: Any) -> LanguageModel:
    """Return a small model far from uniform, always the same, in float64 and without dropout."""
    torch.manual_seed(5)
    backbone = Transformer(8, 2, 2, attention=attention, init="pytorch")
    made = LanguageModel(backbone, vocabulary, embedding_std=1.0, **options)
    with torch.no_grad():
        made.head.proj.weight.mul_(4)
    return made.double().eval()


def batch(rows: int = 3, n: int = 5, seed: int = 0) -> TokenBatch:
    """Return sequences of several lengths of which some targets are not scored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (rows, n + 1), generator=generator)
    lengths = torch.tensor([n, 2, n - 1][:rows])
    targets = tokens[:, 1:].clone()
    targets[torch.arange(n) >= lengths[:, None]] = IGNORE
    targets[0, 1] = IGNORE
    return TokenBatch(tokens[:, :-1], targets, lengths)


def conditionals(made: LanguageModel, given: TokenBatch) -> list[list[float]]:
    """−ln p(target | inputs so far) of every target scored, each from a sequence that ends before it."""
    costs = []
    for inputs, targets in zip(given.inputs, given.targets, strict=True):
        costs.append([])
        for t, target in enumerate(targets.tolist()):
            if target != IGNORE:
                h, _ = made.backbone(made.embedding_scale * made.embedding.weight[inputs[None, : t + 1]])
                logits = h[0, -1] @ made.head.proj.weight.T + made.head.proj.bias
                costs[-1].append((logits.exp().sum().log() - logits[target]).item())
    return costs


@torch.no_grad()
def test_costs_are_those_of_the_conditionals():
    made, given = model(), batch()
    nats = made(given)
    assert nats.shape == (3, 5)
    for row, targets, expected in zip(nats, given.targets, conditionals(made, given), strict=True):
        assert row[targets != IGNORE].tolist() == pytest.approx(expected)
        assert (row[targets == IGNORE] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_loss_is_the_mean_over_the_targets(smoothing: float):
    made, given = model(label_smoothing=smoothing), batch()
    h, _ = made.backbone(made.embedding(given.inputs), None, given.lengths)
    log_p = made.head.log_probs(h)
    scored = given.targets != IGNORE
    right = -log_p[scored].gather(-1, given.targets[scored][:, None])[:, 0]
    expected = (1 - smoothing) * right.mean() - smoothing * log_p[scored].mean()
    torch.testing.assert_close(made.training_step(given), expected)


def test_each_kinds_auxiliary_loss_is_logged_by_itself(monkeypatch: pytest.MonkeyPatch):
    """Of four layers, whose sums over the layers of a kind are what the loss has more than without a weight."""
    compressive = partial(CompressiveAttention, mem_len=2, compressed_len=2, compression_rate=2)
    infinite = partial(
        InfiniteAttention, mem_len=2, segment_len=2, n_basis=4, widths=(0.1,), n_samples=3, kl_weight=0.5
    )
    torch.manual_seed(5)
    made = LanguageModel(Transformer(8, 2, 4, attention=[compressive, infinite]), V, auxiliary_weight=0.25).double()
    logged: dict[str, float] = {}
    monkeypatch.setattr(made, "log", lambda name, value, **_: logged.update({name: float(value)}))
    given = batch(n=9)
    loss = made.training_step(given)
    _, state = made.backbone(made.embedding(given.inputs), None, given.lengths)
    layers = [layer.loss.mean().item() for layer in state.layers]
    assert min(layers) > 0
    assert logged["train/auxiliary_loss/CompressiveMemory"] == pytest.approx(layers[0] + layers[2])
    assert logged["train/auxiliary_loss/InfiniteMemory"] == pytest.approx(layers[1] + layers[3])
    assert loss.item() == pytest.approx(logged["train/loss"] + 0.25 * sum(layers))
    assert len(logged) == 3


def test_a_batch_without_targets_costs_nothing():
    given = batch()
    made = model()
    loss = made.training_step(given._replace(targets=torch.full_like(given.targets, IGNORE)))
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(
    ("unit", "name", "figure"),
    [
        ("byte", "bits_per_byte", lambda nats: nats / math.log(2)),
        ("character", "bits_per_character", lambda nats: nats / math.log(2)),
        ("token", "perplexity", math.exp),
    ],
)
def test_what_is_reported_is_sums_divided_once(tmp_path, unit: str, name: str, figure):
    """Batches of unequal weight: a mean of means is another number."""
    made = model(unit=unit, accuracy=True)
    given = [batch(3, 5), batch(1, 9, seed=1)]
    costs = [cost for b in given for row in conditionals(made, b) for cost in row]
    right = sum(
        int(made.head.log_probs(made.backbone(made.embedding(b.inputs))[0])[i, t].argmax()) == int(b.targets[i, t])
        for b in given
        for i, t in (b.targets != IGNORE).nonzero().tolist()
    )
    for stage, run in (("val", "validate"), ("test", "test")):
        (found,) = getattr(trainer(tmp_path, []), run)(made, DataLoader(given, batch_size=None), verbose=False)
        assert found[f"{stage}/{name}"] == pytest.approx(figure(sum(costs) / len(costs)), rel=1e-6)
        assert found[f"{stage}/accuracy"] == pytest.approx(right / len(costs))
    assert found[f"test/{unit}s"] == len(costs)
    assert made.monitor == f"val/{name}"


def test_byte_pairs_report_bits_per_byte_of_the_text(tmp_path):
    """To compare tokenizers: the nats of all tokens over the bytes of the text, divided once."""
    texts = ["a bird in a box, naïve\n", "a box\n"]
    tokenizer = BPETokenizer.learn([texts[0] * 9], 270)
    made = model(vocabulary=270, tokenizer=tokenizer.to_json())
    given = []
    for text in texts:
        tokens = torch.tensor([[tokenizer.start, *tokenizer.encode(text).tolist()]])
        given.append(TokenBatch(tokens[:, :-1], tokens[:, 1:]))
    nats = sum(cost for b in given for row in conditionals(made, b) for cost in row)
    n_bytes = sum(len(text.encode()) for text in texts)
    assert sum(b.targets.numel() for b in given) < n_bytes
    for stage, run in (("val", "validate"), ("test", "test")):
        (found,) = getattr(trainer(tmp_path, []), run)(made, DataLoader(given, batch_size=None), verbose=False)
        assert found[f"{stage}/bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-6)
    assert made.monitor == "val/perplexity"


def test_predictions_are_a_line_a_sequence():
    made, given = model(), batch()
    with torch.no_grad():
        found = made.predict_step(given)
    expected = conditionals(made, given)
    assert found["targets"].tolist() == [len(row) for row in expected]
    bits = [sum(row) / len(row) / math.log(2) for row in expected]
    assert found["bits_per_target"].tolist() == pytest.approx(bits)


@torch.no_grad()
def test_a_sliding_window_shows_each_position_the_newest():
    made, given = model(eval_window=3), batch(2, 9)
    given = given._replace(lengths=None)
    nats = made(given)
    for row, inputs, targets in zip(nats, given.inputs, given.targets, strict=True):
        for t, target in enumerate(targets.tolist()):
            if target != IGNORE:
                seen = inputs[max(0, t - 2) : t + 1]
                h, _ = made.backbone(made.embedding(seen[None]))
                assert row[t].item() == pytest.approx(-made.head.log_probs(h[0, -1])[target].item())
    assert made.train().active_backbone is made.backbone


def test_evaluation_may_have_another_memory_than_training(tmp_path):
    made = model(partial(TransformerXLAttention, mem_len=2, clamp_len=9), eval_mem_len=5, eval_same_length=True)
    same = model(partial(TransformerXLAttention, mem_len=5, clamp_len=9, same_length=True))
    given = DataLoader([batch(2, 9)], batch_size=None)
    for run in ("validate", "test"):
        figures = [getattr(trainer(tmp_path, []), run)(m, given, verbose=False)[0] for m in (made, same)]
        assert figures[0] == pytest.approx(figures[1])
    attention = made.backbone.blocks[1].attention
    assert (attention.mem_len, attention.clamp_len, attention.same_length) == (2, 9, False)
    drawn = [m.sample(torch.tensor([[1, 2, 3]]), 9, temperature=0).tolist() for m in (made, same)]
    assert drawn[0] == drawn[1]
    assert (attention.mem_len, attention.same_length) == (2, False)


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_an_evaluation_that_an_exception_ended_has_no_effect_on_the_next_run(tmp_path, run: str):
    class Stop(pl.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

        on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    class Record(pl.Callback):
        def on_train_batch_start(self, trainer: Any, made: Any, *_: Any) -> None:
            seen.append((made.backbone.blocks[0].attention.mem_len, made.training, made.head.training))

    seen = list[tuple[int, bool, bool]]()
    made = model(partial(TransformerXLAttention, mem_len=2), eval_mem_len=5).train()
    made.head.eval()  # as a frozen one
    given = [DataLoader([batch(2, 9)], batch_size=None)] * (2 if run == "fit" else 1)
    with pytest.raises(RuntimeError, match="stop"):
        getattr(trainer(tmp_path, [Stop()], max_epochs=1), run)(made, *given)
    scored = DataLoader([batch(2, 9, seed=1)], batch_size=None)
    copy = model(partial(TransformerXLAttention, mem_len=2), eval_mem_len=5)
    copy.load_state_dict(made.state_dict())
    figures = [trainer(tmp_path, []).test(m, scored, verbose=False)[0] for m in (made, copy)]
    assert figures[0] == figures[1]
    trainer(tmp_path, [Record()], max_epochs=1).fit(made, scored)
    assert seen == [(2, True, False)]


def test_drawing_within_a_validation_leaves_the_memory_of_training_alone():
    made = model(partial(TransformerXLAttention, mem_len=2), eval_mem_len=5)
    made.on_validation_start()
    made.sample(batch().inputs, 2)
    assert made.backbone.blocks[0].attention.mem_len == 5
    made.on_validation_end()
    assert made.backbone.blocks[0].attention.mem_len == 2


def test_the_embedding_is_scaled():
    given = batch()
    for scale in (1.0, 3.0):
        made = model(embedding_scale=scale)
        assert made(given)[0, 0].item() == pytest.approx(conditionals(made, given)[0][0])


# --------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(
    ("attention", "compile"),
    [
        (SoftmaxAttention, False),
        pytest.param(partial(LinearAttention, chunk_size=2), True, marks=pytest.mark.exhaustive),  # in machine code
    ],
)
def test_the_likeliest_continuation(attention, compile: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_effattn.generation.sampling.BACKEND", "eager")
    made = model(attention)
    prompt = torch.tensor([[1, 2, 3], [0, 5, 4]])
    shown: list[torch.Tensor] = []
    drawn = made.sample(prompt, 4, temperature=0, compile=compile, on_tokens=shown.append)
    sequences = prompt
    with torch.no_grad():
        for _ in range(4):
            h, _ = made.backbone(made.embedding(sequences))
            sequences = torch.cat([sequences, made.head.log_probs(h[:, -1]).argmax(-1, keepdim=True)], 1)
    assert drawn.tolist() == sequences[:, 3:].tolist()
    assert torch.stack(shown, 1).tolist() == drawn.tolist()


def test_a_tokenizer_comes_with_the_model():
    spec = ByteTokenizer().to_json()
    assert model(tokenizer=spec).text.encode("ab").tolist() == [97, 98]
    with pytest.raises(ValueError, match="can't be decoded to text"):
        _ = model().text


# ----------------------------------------------------------------------------------------------------------- training


@pytest.mark.exhaustive
def test_copying_is_learned(tmp_path):
    """The loss falls far below ln 3 = 1.0986, which is what a model that does not look back scores."""
    torch.manual_seed(0)
    backbone = Transformer(32, 4, 2, attention=SoftmaxAttention, norm="post", activation="relu", init="pytorch")
    made = LanguageModel(backbone, 4, embedding_std=1.0, accuracy=True, optimizer=partial(torch.optim.Adam, lr=3e-3))
    data = CopyTask(max_len=8, min_len=8, n_symbols=3, batch_size=64, n_train=64 * 150, n_val=100)
    fit = trainer(tmp_path, [], max_epochs=1)
    fit.fit(made, data)
    assert fit.callback_metrics["val/perplexity"] < math.exp(0.3)
    assert fit.callback_metrics["val/accuracy"] > 0.9


def test_a_checkpoint_builds_the_model_again(tmp_path):
    adam = partial(torch.optim.Adam, lr=np.float64(1e-3))
    made = model(partial(LinearAttention, chunk_size=2), np.int64(V), unit="byte", tie=True, optimizer=adam).float()
    data = CopyTask(max_len=8, n_symbols=5, batch_size=4, n_train=8, n_val=4)
    data.hparams.update(root=tmp_path, transforms=[len])
    fit = trainer(tmp_path, [], max_epochs=1)
    fit.fit(made, data)
    with pytest.warns(UserWarning, match="checkpoints leave out the data module's transforms"):
        fit.save_checkpoint(tmp_path / "model.ckpt")
    kept = torch.load(tmp_path / "model.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    assert kept["root"] == str(tmp_path)
    assert "transforms" not in kept
    again = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt").eval()
    with torch.no_grad():
        assert torch.equal(again(batch()), made.eval()(batch()))
    assert again.monitor == "val/bits_per_byte"
    assert again.head.proj.weight is again.embedding.weight


def test_a_run_resumes_from_lightnings_checkpoint_with_its_random_states(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    ended = []
    for callbacks, path in (([saving], None), ([], tmp_path / "step=2.ckpt")):
        torch.manual_seed(5)
        made = LanguageModel(Transformer(8, 2, 1, attention=LinearAttention, dropout=0.5), V)
        data = CopyTask(max_len=8, n_symbols=5, batch_size=4, n_train=16, n_val=4)
        trainer(tmp_path, callbacks, max_epochs=2).fit(made, data, ckpt_path=path)
        ended.append(torch.cat([p.detach().flatten() for p in made.parameters()]))
    assert torch.equal(*ended)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "bit"}, "unit='bit' is not one of"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"eval_mem_len": 3}, "eval_mem_len=3, but no module in the backbone has a `mem_len`"),
        ({"eval_window": 0}, "window=0"),
    ],
)
def test_wrong_settings_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_a_backbone_that_sees_the_future_is_refused():
    with pytest.raises(ValueError, match="causal=False"):
        LanguageModel(Transformer(8, 2, 1, causal=False), V)


def test_a_token_of_another_vocabulary_is_named():
    given = batch()
    given.inputs[1, 0] = V
    with pytest.raises(ValueError, match=f"token {V}, but the model has vocab_size={V}"):
        model()(given)


@pytest.mark.parametrize(
    "attention",
    [SoftmaxAttention, LinearAttention, partial(CompressiveAttention, mem_len=1, compressed_len=2, compression_rate=2)],
)
def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_sequences_alone(attention: Any):
    """Σ −ln p / T + the mean over the sequences of their auxiliary losses, in both layouts."""
    made, given = model(attention), batch(n=9)
    n_scored = (given.targets != IGNORE).sum()
    expected = torch.zeros((), dtype=torch.float64)
    for inputs, targets, n in zip(given.inputs, given.targets, given.lengths, strict=True):
        h, state = made.backbone(made.embedding(inputs[None, :n]))
        expected = expected + F.cross_entropy(made.head.proj(h)[0], targets[:n], reduction="sum") / n_scored
        if (auxiliary := losses(state)) is not None:
            expected = expected + auxiliary.sum() / len(given.inputs)
    gradients = torch.autograd.grad(expected, list(made.parameters()), materialize_grads=True)
    for layout in (given, pack(given)):
        loss = made.objective(layout).loss
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        actual = torch.autograd.grad(loss, list(made.parameters()), materialize_grads=True)
        torch.testing.assert_close(actual, gradients, rtol=1e-10, atol=1e-13)


def test_accuracies_by_length_of_packed_rows_are_refused():
    made = model(accuracy=True, test_lengths=(2, 5))
    with pytest.raises(ValueError, match="test_lengths does not support several sequences in a row"):
        made.score("test", pack(batch()))


@pytest.mark.parametrize(
    "attention",
    [
        LinearAttention,
        partial(TransformerXLAttention, mem_len=300, same_length=True),
        partial(SoftmaxAttention, window=3),
    ],
)
def test_packed_documents_are_scored_as_apart(attention: Any):
    """Memory is carried, so each token has all of its document before it, wherever segments end."""
    sizes = [1, 9, 2, 4, 1, 17, 3]
    tokens = np.random.default_rng(0).integers(0, V - 1, sum(sizes)).astype(np.uint16)
    made = model(attention)
    nll = {}
    for packed in (False, True):
        streams = TokenStreams(
            tokens,
            np.cumsum([0, *sizes]),
            start=V - 1,
            segment_len=5,
            batch_size=1,
            num_replicas=1,
            rank=0,
            joined=packed,
            packed=packed,
            drop_last=False,
        )
        memory, scored = made.backbone.initial_state(1), []
        for t in range(len(streams)):
            segment = streams[t]
            memory = made.backbone.reset(memory, segment.fresh)
            with torch.no_grad():
                scored.append(made(segment, memory)[segment.targets != IGNORE])
                memory = made.objective(segment, memory).state
        nll[packed] = torch.cat(scored)
    assert len(nll[True]) == sum(sizes)
    torch.testing.assert_close(nll[True], nll[False], rtol=1e-10, atol=1e-12)


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("def main(", encoding="utf-8-sig")
    assert samples._prompt(TextOptions(prompt_file=str(tmp_path / "prompt.txt"))) == "def main("
