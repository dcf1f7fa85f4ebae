import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lit_effattn import EncoderDecoder, Transformer
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
)
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.datamodules.common.tokens import IGNORE, PairBatch
from lit_effattn.datamodules.text.tokenizers import CharacterTokenizer, WordTokenizer
from lit_effattn.generation import Kept
from lit_effattn.generation.beam import Hypotheses
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.tasks import SequenceToSequence
from lit_effattn.tasks.kept_states import load_state, save_state
from lit_effattn.tasks.options import TargetOptions
from tests.support.commands import REPOSITORY

LETTERS = CharacterTokenizer("abcd")  # 4 letters, <unk>, <start>
PHONES = WordTokenizer(["AA", "B", "K", "<unk>"])  # and <start>


def model(cross: Any = SoftmaxCrossAttention, attention: Any = LinearAttention, **options: Any) -> SequenceToSequence:
    """Return a small model far from uniform, always the same, in float64 and without dropout."""
    torch.manual_seed(5)
    backbone = EncoderDecoder(
        Transformer(8, 2, 2, attention=LinearAttention, causal=False, init="pytorch"),
        Transformer(8, 2, 1, attention=attention, cross_attention=cross, init="pytorch"),
    )
    vocabularies = {"source_tokenizer": LETTERS.to_json(), "target_tokenizer": PHONES.to_json()}
    made = SequenceToSequence(
        backbone, LETTERS.n_tokens, PHONES.n_tokens, **{**vocabularies, **{"metrics": ["exact_match"]}, **options}
    )
    with torch.no_grad():
        made.head.proj.weight.mul_(4)
    return made.double().eval()


def batch() -> PairBatch:
    """Return pairs of several lengths."""
    generator = torch.Generator().manual_seed(0)
    source_lengths, lengths = torch.tensor([5, 2, 3]), torch.tensor([2, 4, 1])
    source = torch.randint(4, (3, 5), generator=generator)
    target = torch.randint(3, (3, 3), generator=generator)
    for row in range(3):
        source[row, source_lengths[row] - 1 :] = LETTERS.start
    start = torch.full((3, 1), PHONES.start)
    inputs, targets = torch.cat([start, target], 1), torch.cat([target, start], 1)
    for row, n in enumerate(lengths.tolist()):
        targets[row, n - 1] = PHONES.start
        targets[row, n:] = IGNORE
    texts = ["abcd", "a", "ab"]
    return PairBatch(source, source_lengths, inputs, targets, lengths, texts, [["AA B"], ["B"], ["K"]])


def conditionals(made: SequenceToSequence, given: PairBatch) -> list[list[float]]:
    """−ln p(target | source, targets before), each from a pair without padding whose target ends before it."""
    costs: list[list[float]] = []
    for row in range(len(given.source)):
        source = given.source[row, : given.source_lengths[row]]
        costs.append([])
        for t in range(int(given.lengths[row])):
            encoded, _ = made.backbone.encoder(8**0.5 * made.source_embedding.weight[source][None])
            state = made.backbone.decoder.remember(encoded)
            x = 8**0.5 * made.target_embedding.weight[given.inputs[row, : t + 1]][None]
            h, _ = made.backbone.decoder(x, state)
            logits = h[0, -1] @ made.head.proj.weight.T + made.head.proj.bias
            costs[-1].append((logits.logsumexp(0) - logits[given.targets[row, t]]).item())
    return costs


@torch.no_grad()
@pytest.mark.parametrize("cross", [SoftmaxCrossAttention, LinearCrossAttention])
def test_costs_are_those_of_the_conditionals(cross: Any):
    made, given = model(cross), batch()
    nats = made(given)
    for row, n, expected in zip(nats, given.lengths, conditionals(made, given), strict=True):
        assert row[:n].tolist() == pytest.approx(expected)
        assert (row[n:] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_loss_is_the_mean_over_the_targets(smoothing: float):
    made, given = model(label_smoothing=smoothing), batch()
    h, _ = made.hidden(given)
    log_p = made.head.log_probs(h)[given.targets != IGNORE]
    right = -log_p.gather(-1, given.targets[given.targets != IGNORE][:, None])
    expected = (1 - smoothing) * right.mean() - smoothing * log_p.mean()
    torch.testing.assert_close(made.training_step(given), expected)


def test_matrices_are_shared():
    one = {"target_tokenizer": LETTERS.to_json(), "source_tokenizer": LETTERS.to_json()}
    backbone = model().float().backbone
    none, target, everything = (
        SequenceToSequence(backbone, 6, 6, **one, tie=tie, metrics=["exact_match"]) for tie in ("none", "target", "all")
    )
    counts = [sum(p.numel() for p in made.parameters()) for made in (none, target, everything)]
    assert counts[0] - counts[1] == counts[1] - counts[2] == 6 * 8
    assert everything.head.proj.weight is everything.source_embedding.weight is everything.target_embedding.weight


@pytest.mark.parametrize(("name", "stacks"), [("en_de_base", 44_138_496), ("en_de_big", 176_357_376)])
def test_the_papers_sizes(name: str, stacks: int):
    """Vaswani et al. 2017, table 3: 65 and 213 million, with a vocabulary of about 37,000. By hand, per layer:

    encoder 4 E² + 4 E (attention), 2 E F + F + E (feed-forward), 4 E (norms); decoder 4 E² + 4 E + 2 E more.
    """
    arguments = yaml.safe_load(Path(REPOSITORY, "configs", f"wmt14_{name}.yaml").read_text())["model"]["init_args"]
    sides = {side: part["init_args"] for side, part in arguments["backbone"]["init_args"].items()}
    cross = {"cross_attention": SoftmaxCrossAttention}
    with torch.device("meta"):
        backbone = EncoderDecoder(Transformer(**sides["encoder"]), Transformer(**{**sides["decoder"], **cross}))
        head = partial(CategoricalHead, **arguments["head"]["init_args"])
        made = SequenceToSequence(backbone, 37_000, 37_000, tie=arguments["tie"], head=head, metrics=[])
    width = sides["encoder"]["d_model"]
    assert sum(p.numel() for p in made.parameters()) == stacks + width * 37_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"tie": "both"}, "tie='both'"),
        ({"tie": "all"}, r"one vocabulary .* \(6, 8\) and \(5, 8\); set joint=true"),
        ({"metrics": ["wer"]}, "metrics='wer' is not one of .*error_rate"),
        ({"decode_every_n_epochs": 0}, "decode_every_n_epochs=0"),
        ({"beam": 0}, "beam=0"),
        ({"length_penalty": -1.0}, "length_penalty=-1.0"),
        ({"length_norm": "wu"}, "length_norm='wu' is not one of gnmt, average"),
        ({"max_output_len": 0}, "max_output_len=0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_equal_shapes_are_not_one_vocabulary():
    others = CharacterTokenizer("abce").to_json()
    with pytest.raises(ValueError, match="one vocabulary"):
        model(tie="all", target_tokenizer=others).__class__(
            model().backbone, 6, 6, LETTERS.to_json(), others, tie="all", metrics=["exact_match"]
        )


# ------------------------------------------------------------------------------------------------------- the outputs


@torch.no_grad()
def greedy(made: SequenceToSequence, source: Tensor) -> list[int]:
    """The likeliest token after each prefix, each read from the start, up to the end token or source + 50."""
    tokens = [PHONES.start]
    for _ in range(len(source) + 50):
        state = made.remember(source[None])
        h, _ = made.backbone(made._embed_target(torch.tensor([tokens])), state)
        tokens.append(int(made.head.log_probs(h[0, -1]).argmax()))
        if tokens[-1] == PHONES.start:
            break
    return tokens[1:]


def test_a_beam_of_one_is_greedy_for_each_source():
    made, given = model(), batch()
    with torch.no_grad():
        made.head.proj.bias[PHONES.start] -= 2  # not too early, not too late
    found = made.search(given.source, given.source_lengths, beam=1)
    expected = [greedy(made, s[:n]) for s, n in zip(given.source, given.source_lengths, strict=True)]
    assert len({len(tokens) for tokens in expected}) > 1
    for row, n, tokens in zip(found.tokens[:, 0], found.lengths[:, 0], expected, strict=True):
        assert row[:n].tolist() == tokens


def test_an_output_has_at_most_50_tokens_more_than_its_source_and_as_many_as_the_option_says():
    made, given = model(max_output_len=54), batch()
    with torch.no_grad():
        made.head.proj.bias[PHONES.start] = -1e9
    found = made.search(given.source, given.source_lengths, beam=2)
    assert found.lengths[:, 0].tolist() == [54, 52, 53]  # sources have 5, 2 and 3 tokens
    made.backbone.decoder.positions = LearnedPositions(8, max_len=53).double()
    assert made.search(given.source, given.source_lengths, beam=2).lengths[:, 0].tolist() == [53, 52, 53]


def answers(*texts: str) -> Any:
    """A search that finds these."""

    def search(source: Tensor, lengths: Tensor, **_: Any) -> Hypotheses:
        tokens = [[*PHONES.encode(text).tolist(), PHONES.start] for text in texts]
        found = torch.full((len(texts), 1, 9), PHONES.start)
        for row, of_row in enumerate(tokens):
            found[row, 0, : len(of_row)] = torch.tensor(of_row)
        scores = torch.zeros(len(texts), 1, dtype=torch.float64)
        return Hypotheses(found, torch.tensor([[len(t)] for t in tokens]), scores, scores)

    return search


def test_outputs_are_scored_against_the_nearest_reference(monkeypatch: pytest.MonkeyPatch):
    """Of 3 sequences one equals its second reference; edits are 0 of 2, 1 of 2 and 1 of 1."""
    made = model(metrics=["exact_match", "error_rate"])
    monkeypatch.setattr(made, "search", answers("AA B", "K B", ""))
    given = batch()._replace(references=[["K K K", "AA B"], ["K AA"], ["B"]])
    metrics = made.score("test", given)
    assert float(metrics["exact_match"].compute()) == pytest.approx(1 / 3)
    assert float(metrics["error_rate"].compute()) == pytest.approx(2 / 5)
    assert int(metrics["sequences"].compute()) == 3
    assert float(metrics["perplexity"].compute()) == pytest.approx(
        math.exp(sum(map(sum, conditionals(made, given))) / 7)
    )


def test_texts_are_scored_by_sacrebleu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    sacrebleu = pytest.importorskip("sacrebleu")
    made = model(metrics=["bleu", "chrf"])
    outputs = ["AA B K AA K", "K B AA", "B B K B AA"]
    monkeypatch.setattr(made, "search", answers(*outputs))
    references = ["AA B K AA B", "K B AA", "B K K B AA"]
    metrics = made.score("test", batch()._replace(references=[[text] for text in references]))
    expected = sacrebleu.corpus_bleu(outputs, [references]).score
    assert float(metrics["bleu"].compute()) == pytest.approx(expected)
    assert float(metrics["chrf"].compute()) == pytest.approx(sacrebleu.corpus_chrf(outputs, [references]).score)


def test_without_tokenizers_texts_are_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of 3 sequences one equals its reference; edits are 0 of 2, 1 of 1 and 1 of 1."""
    none = {"source_tokenizer": None, "target_tokenizer": None}
    made = model(**none, metrics=["exact_match", "error_rate"])
    monkeypatch.setattr(made, "search", answers("AA B", "K B", ""))  # tokens 0 1, 2 1 and none
    given = batch()._replace(references=[["0 1"], ["2"], ["1"]])
    metrics = made.score("test", given)
    assert float(metrics["exact_match"].compute()) == pytest.approx(1 / 3)
    assert float(metrics["error_rate"].compute()) == pytest.approx(2 / 4)
    assert [t.entry["outputs"][0]["text"] for t in made.predict_step(given, 1)] == ["0 1", "2 1", ""]
    assert made.encode("3 0").tolist() == [3, 0, 5]
    with pytest.raises(ValueError, match="the text has '5', where a token's number is expected"):
        made.encode("0 5 x")


def test_long_sources_are_not_drawn(monkeypatch: pytest.MonkeyPatch):
    made = model()
    monkeypatch.setattr("lit_effattn.tasks.sequence_to_sequence.PICTURED_LEN", 3)
    assert [t.weights is None for t in made.predict_step(batch(), 0)] == [True, False, False]  # 5, 2 and 3 tokens


@pytest.mark.parametrize(
    ("every", "command", "epoch", "decodes"),
    [
        (None, "validate", 0, False),
        (2, "validate", 0, True),
        (None, "fit", 0, False),
        (2, "fit", 0, False),
        (2, "fit", 1, True),
    ],
)
def test_validation_decodes_every_n_epochs(every: int | None, command: str, epoch: int, decodes: bool):
    made = model(decode_every_n_epochs=every)
    made._trainer = SimpleNamespace(current_epoch=epoch, state=SimpleNamespace(fn=command))  # type: ignore[assignment]
    assert ("exact_match" in made.score("val", batch())) == decodes


def test_samples_are_the_best_targets_with_their_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = model()
    for layer in (m for m in made.train().modules() if isinstance(m, nn.Dropout)):
        layer.p = 0.5  # has no effect: outputs are searched in evaluation mode
    made.write_samples(lambda: tmp_path, TargetOptions(n=2, source="abc", beam=3, length_penalty=0.0))
    assert made.training
    (line,) = (tmp_path / "translations.jsonl").read_text().splitlines()
    entry = json.loads(line)
    tokens = torch.tensor([[*LETTERS.encode("abc").tolist(), LETTERS.start]])
    found = made.eval().search(tokens, beam=3, length_penalty=0.0, n_best=2)
    assert entry["source"] == "abc"
    assert [o["text"] for o in entry["outputs"]] == made.texts(found)[0]
    assert [o["log_p"] for o in entry["outputs"]] == pytest.approx(found.log_probs[0].tolist(), abs=1e-4)
    assert (tmp_path / entry["picture"]).is_file()
    assert all(o["text"] in capsys.readouterr().out for o in entry["outputs"][:1])


@pytest.mark.parametrize("attention", [LinearAttention, SoftmaxAttention], ids=["linear", "softmax"])
@pytest.mark.parametrize("cross", [SoftmaxCrossAttention, LinearCrossAttention, PerformerCrossAttention])
def test_a_kept_source_is_not_encoded_again(cross: Any, attention: Any, tmp_path: Path):
    made, lengths = model(cross, attention=attention, max_output_len=9), list[int]()
    options: Any = {"n": 2}
    made.backbone.encoder.register_forward_hook(lambda _, args, __: lengths.append(args[0].size(1)))
    for name in ("whole", "kept", "going on"):
        (tmp_path / name).mkdir()
    file = str(tmp_path / "source.state")
    made.write_samples(lambda: tmp_path / "whole", TargetOptions(source="abcd", beam=3, **options))
    made.write_samples(lambda: tmp_path / "kept", TargetOptions(source="abcd", beam=2, save_state=file, **options))
    assert lengths == [5, 5] * 2  # the search and the picture
    lengths.clear()
    made.write_samples(lambda: tmp_path / "going on", TargetOptions(state=file, beam=3, **options))
    assert lengths == [5]  # the picture
    results = [(tmp_path / name / "translations.jsonl").read_bytes() for name in ("whole", "going on")]
    assert results[0] == results[1]


def test_other_states_are_refused(tmp_path: Path):
    made, file = model(), tmp_path / "source.state"
    made.write_samples(lambda: tmp_path, TargetOptions(source="abcd", save_state=str(file)))
    with pytest.raises(ValueError, match="a state of other sizes"):
        model(LinearCrossAttention).write_samples(lambda: tmp_path, TargetOptions(state=str(file)))
    with pytest.raises(ValueError, match="a model with other weights"):
        made.float().write_samples(lambda: tmp_path, TargetOptions(state=str(file)))
    kept = load_state(file, made.double())
    for wrong, message in ((kept.tokens[0], "tokens is torch.int64 of shape"), (kept.tokens + 9, "source token")):
        save_state(Kept(kept.state, wrong, 0), file, made)
        with pytest.raises(ValueError, match=message):
            made.write_samples(lambda: tmp_path, TargetOptions(state=str(file)))
    text = tmp_path / "notes.txt"
    text.write_text("do not lose me")
    with pytest.raises(FileExistsError, match=r"notes\.txt exists and is not a saved state"):
        made.write_samples(lambda: tmp_path, TargetOptions(source="abcd", save_state=str(text)))


def test_scores_are_averages_if_that_is_wanted():
    tokens = torch.tensor([[*LETTERS.encode("abc").tolist(), LETTERS.start]])
    ways = [model(length_penalty=1.0, length_norm="average").search(tokens, beam=3, n_best=3)]
    ways.append(model().search(tokens, beam=3, n_best=3, length_penalty=1.0, length_norm="average"))
    for found in ways:
        torch.testing.assert_close(found.scores, found.log_probs / found.lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "axz"}, "'x', 'z', which the model's training text does not contain"),
        ({"source": ""}, "has no tokens"),
    ],
    ids=["unknown", "empty"],
)
def test_unreadable_sources_are_rejected(options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        model().write_samples(lambda: tmp_path, TargetOptions(**options))


def test_unknown_words_of_a_source_are_named():
    with pytest.warns(UserWarning, match="the text has 'x', read as <unk>"):
        assert model(source_tokenizer=PHONES.to_json()).encode("B x").tolist() == [1, 3, 4]


def test_predictions_are_in_the_order_of_the_file(tmp_path: Path):
    made = model()
    given = batch()._replace(indices=torch.tensor([2, 0, 1]))
    made.write_predictions([made.predict_step(given, 1)], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "translations.jsonl").read_text().splitlines()]
    assert [line["source"] for line in lines] == ["a", "ab", "abcd"]
    assert [line["references"] for line in lines] == [["B"], ["K"], ["AA B"]]


@pytest.mark.parametrize(("name", "token"), [("source", 6), ("target", 5)])
def test_tokens_of_another_vocabulary_are_refused(name: str, token: int):
    given = batch()
    field = given.source if name == "source" else given.inputs
    field[0, 0] = token
    with pytest.raises(ValueError, match=rf"{name} token {token}, .*{name}_vocab_size={token}"):
        model()(given)


def test_a_checkpoint_of_other_letters_is_refused():
    made = model()
    others = {"hyper_parameters": {"source_tokenizer": CharacterTokenizer("abce").to_json()}}
    with pytest.raises(ValueError, match=r"source_tokenizer differ: characters, a vocab.* means another one"):
        made.on_load_checkpoint({**others, "state_dict": made.state_dict()})
