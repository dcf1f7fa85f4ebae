import json
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks.experiments.recl import effective_length, gains, load, losses, read_documents
from lit_effattn import LSTM, Transformer
from lit_effattn.attention import SoftmaxAttention, TransformerXLAttention
from lit_effattn.datamodules import TextStream, TokenBatch
from lit_effattn.tasks import LanguageModel

CONTEXTS = [100, 200, 300, 400, 500]


def falling_until(context: int, n_positions: int = 20) -> Tensor:
    """Losses of one model, (contexts, positions): a tenth of a nat less for each longer context, up to `context`."""
    least = [3 - 0.1 * (min(c, context) / 100 - 1) for c in CONTEXTS]
    return torch.tensor(least, dtype=torch.float64)[:, None].expand(-1, n_positions)


def length_of(model_losses: Tensor, ratio: float = 1.0, threshold: float = 0.01) -> list[int]:
    found, _ = gains(model_losses, ratio)
    return [effective_length(g.tolist(), CONTEXTS, threshold) for g in found]


@pytest.mark.parametrize("context", [100, 300, 500])
def test_effective_length_is_where_losses_stop_falling(context: int):
    assert length_of(falling_until(context)[None]) == [context]


def test_gain_by_hand():
    found, _ = gains(falling_until(300)[None], 1.0)
    kept = 1 - math.exp(-0.1)
    assert found[0].tolist() == pytest.approx([kept, kept, 0, 0], abs=1e-7)


def test_gains_below_the_threshold_do_not_count():
    slow = torch.tensor([3.0, 2.9, 2.891, 2.882, 2.873])[:, None].expand(-1, 4)[None]  # by .9 % a step after the first
    assert length_of(slow) == [200]
    assert length_of(slow, threshold=0.005) == [500]


def test_a_later_gain_does_not_count_after_a_step_without_one():
    late = torch.tensor([3.0, 2.5, 2.5, 2.0, 2.0])[:, None].expand(-1, 4)[None]
    assert length_of(late) == [200]


def test_baseline_is_the_group_s_best():
    """A weak model gains much over itself, and nothing over what the strong one has without that context."""
    strong, weak = torch.full((5, 8), 1.0), falling_until(500, 8)
    assert length_of(weak[None]) == [500]
    assert length_of(torch.stack([strong, weak])) == [100, 100]


def test_baseline_is_the_best_of_each_position():
    losses = torch.tensor([[[1.0, 4.0], [1.0, 2.0]], [[3.0, 2.0], [0.5, 2.5]]])  # (models, contexts, positions)
    # b = 1, 2. The first model's 1, 2 is no gain; the second's min(1, .5), min(2, 2.5) is one of a quarter of a nat.
    found, error = gains(losses, 1.0)
    assert found[:, 0].tolist() == pytest.approx([0, 1 - math.exp(-0.25)])
    assert error[:, 0].tolist() == pytest.approx([0, math.exp(-0.25) * 0.25 / math.sqrt(2)])


def test_positions_are_the_hardest_of_the_short_context():
    """Of 10 positions the 2 hardest at 100 improve by 1 nat; which these are is another two at 200."""
    model = torch.full((3, 10), 1.0)
    model[0, [3, 7]] = 4.0
    model[1, [3, 7]] = 3.0
    model[1, [0, 1]] = 5.0
    model[2] = model[1]
    model[2, [0, 1]] = 3.0
    found, _ = gains(model[None], 0.2)
    assert found[0].tolist() == pytest.approx([1 - math.exp(-1), 1 - math.exp(-2)])
    everywhere, _ = gains(model[None], 1.0)
    assert everywhere[0].tolist() == pytest.approx([1 - math.exp(-2 / 10), 1 - math.exp(-4 / 10)])


def language_model(backbone, data: TextStream) -> LanguageModel:
    return LanguageModel(backbone, data.vocab_size, unit="byte", tokenizer=data.tokenizer).eval()


def test_loss_is_of_exactly_so_much_context():
    data = TextStream(max_bytes=20_000)
    tokens = torch.randint(0, 256, (300,))
    model = language_model(Transformer(16, 2, 2, attention=SoftmaxAttention), data)
    found = losses(model, tokens, torch.tensor([60, 100, 299]), [1, 7, 33], 8, batch_size=2)
    for row, c in zip(found, [1, 7, 33], strict=True):
        for loss, t in zip(row, [60, 100, 299], strict=True):
            batch = TokenBatch(tokens[None, t - c : t], tokens[None, t - c + 1 : t + 1])
            assert float(loss) == pytest.approx(model(batch)[0, -1].item(), rel=1e-4)
    assert model.memory is None


def test_a_memory_of_five_makes_use_of_no_more():
    data = TextStream(max_bytes=20_000)
    attention = partial(TransformerXLAttention, mem_len=5, same_length=True)
    model = language_model(Transformer(16, 2, 1, attention=attention, positions=None), data)
    four, five, twenty = losses(model, torch.randint(0, 256, (99,)), torch.arange(40, 80), [4, 5, 20], 3, 16)
    torch.testing.assert_close(five, twenty, rtol=1e-4, atol=1e-5)
    assert (four - five).abs().max() > 1e-4


def test_checkpoint_tells_model_and_data(language_models):
    model, data = load(language_models[0], torch.device("cpu"), "source", "n_types")
    assert isinstance(model.backbone, LSTM)
    assert data["segment_len"] == 16
    with pytest.raises(ValueError, match="must be of a LanguageModel whose data have n_types"):
        load(language_models[0], torch.device("cpu"), "n_types")


def test_documents_are_those_that_are_scored(language_models):
    options = load(language_models[0], torch.device("cpu"), "source")[1]
    documents = read_documents(options)
    data = TextStream(**options)
    assert sum(map(len, documents)) == data.n_scored["test"]
    tokens = data._store.shard("test").tokens
    borders = data._store.split("test").borders
    assert torch.cat(documents).tolist() == tokens.tolist()
    assert [len(d) for d in documents] == (borders[1:] - borders[:-1]).tolist()
    assert len(read_documents({**options, "documents": "joined"})) == 1


def test_table(language_models, tmp_path, capsys):
    words = ["recl", "--lengths", "8", "16", "24", "--positions", "40", "--device", "cpu", "--output", str(tmp_path)]
    command.main([*words, "--ckpt_path", *map(str, language_models)])
    rows = json.loads((tmp_path / "recl.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["model"], row["r"]) for row in rows] == [(str(p), r) for r in (0.1, 0.5, 1.0) for p in language_models]
    for row in rows:
        assert row["RECL"] in ("≤ 8", "16", "≥ 24")
        assert {"gain 8 → 16, %", "gain 16 → 24, %"} <= row.keys()
    assert "40 positions of the test text of source stdlib" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [("--lengths 8", "name two or more"), ("--lengths 8 9999999", "have 9999999 tokens, the longest")],
)
def test_what_has_no_answer_is_refused(words, complaint, language_models):
    with pytest.raises(ValueError, match=complaint):
        command.main(["recl", *words.split(), "--device", "cpu", "--ckpt_path", str(language_models[0])])


def test_ratio_beyond_one_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["recl", "--ckpt_path", "a", "--ratios", "10"])
    assert "10 must be above 0 and at most 1" in capsys.readouterr().err
