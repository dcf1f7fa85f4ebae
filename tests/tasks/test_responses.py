import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import InfiniteAttention, TransformerXLAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import DialogueTask
from lit_effattn.datamodules.common.tokens import Response, TokenBatch
from lit_effattn.tasks import LanguageModel
from lit_effattn.tasks.responses import score_texts
from tests.callbacks.tiny import trainer


def data(segment_len: int | None) -> DialogueTask:
    sizes = {"n_facts": 4, "n_near": 1, "n_far": 3, "n_keys": 4, "n_values": 3, "n_chat": 2, "value_len": 2}
    return DialogueTask(12, **sizes, segment_len=segment_len, batch_size=2, n_val=5, n_test=5)


class Long(TransformerXLAttention):
    def __init__(self, d_model: int, n_heads: int, causal: bool = True) -> None:
        super().__init__(d_model, n_heads, causal, mem_len=100)


class Signal(InfiniteAttention):
    def __init__(self, d_model: int, n_heads: int, causal: bool = True) -> None:
        super().__init__(d_model, n_heads, causal, mem_len=4, segment_len=4, n_basis=4, widths=(0.1, 0.3), n_samples=4)


def model(attention: Any = Long, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    made = LanguageModel(
        Transformer(8, 2, 2, attention=attention, init="pytorch"),
        data(None).vocab_size,
        embedding_std=1.0,
        **{"response_metrics": ["f1", "rouge_l", "exact_match"], "max_response_len": 5, **options},
    )
    with torch.no_grad():
        for block in made.backbone.blocks:
            block.attention.out_proj.weight.mul_(8)  # what is written depends on the context
    return made.double().eval()


@torch.no_grad()
def greedy(made: LanguageModel, batch: TokenBatch, row: int, at: int) -> str:
    """The likeliest tokens one after the other, from the whole sequence each time; the last token ends a response."""
    tokens, end = batch.inputs[row, : at + 1].tolist(), made.vocab_size - 1
    written: list[int] = []
    while len(written) < 5 and (not written or written[-1] != end):
        hidden, _ = made.backbone(made.embedding(torch.tensor([tokens + written])))
        written.append(int(made.head.log_probs(hidden[0, -1]).argmax()))
    return " ".join(str(token) for token in written if token != end)


@pytest.mark.parametrize("attention", [Long, Signal])
def test_responses_are_written_after_the_right_tokens_before_them(attention: Any, tmp_path: Path):
    """For any length of the segments; those of a batch differ in their positions."""
    made = model(attention)
    whole = data(None).sequences("test")[[0, 1, 2, 3, 4], 0]
    expected = [
        {"number": r.number, "response": greedy(made, whole, row, r.position), "reference": r.text}
        for row, of_row in enumerate(whole.responses)
        for r in of_row
    ]
    assert len({entry["response"] for entry in expected}) > 3
    for segment_len in (7, None):
        run = trainer(tmp_path, callbacks=[MemoryCarry()])
        made.write_predictions(run.predict(made, data(segment_len).predict_dataloader()), tmp_path)
        lines = (tmp_path / "responses.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected


def test_a_test_scores_what_is_written(tmp_path: Path):
    made = model()
    (scores,) = trainer(tmp_path, callbacks=[MemoryCarry()]).test(made, data(7), verbose=False)
    written = [pair for batch in data(None).test_dataloader() for pair in made.predict_step(batch)]
    assert len(written) == 15
    sets = [(set(text.split()), set(response.text.split())) for response, text in written]
    assert scores["test/exact_match"] == sum(text == response.text for response, text in written) / 15
    assert 0 < scores["test/f1"] <= 100
    assert (scores["test/f1"] == 100) == all(a == b for a, b in sets)
    assert "test/rouge_l" in scores
    assert "test/tokens" in scores


def test_nothing_is_written_where_it_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = model(response_metrics=())
    monkeypatch.setattr("lit_effattn.tasks.responses.beam_search", None)
    run = trainer(tmp_path, callbacks=[MemoryCarry()])
    assert not {"test/f1", "test/exact_match"} & run.test(made, data(7), verbose=False)[0].keys()
    assert "scores of 5 documents" in made.write_predictions(run.predict(made, data(7)), tmp_path)
    run.validate(model(), data(7), verbose=False)  # only the perplexity


def test_scores_compare_words():
    made = model()
    score_texts(made.response_scores, [(Response(0, "a cat  sat", 0), "a cat sat"), (Response(0, "no", 1), "yes")])
    assert {name: float(metric.compute()) for name, metric in made.response_scores.items()} == {
        "f1": 50,
        "rouge_l": 50,
        "exact_match": 0.5,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_metrics": ["meteor"]}, "response_metrics='meteor' is not one of f1, rouge_l, exact"),
        ({"eval_window": 4}, "eval_window=4: responses are written from a memory"),
        ({"beam": 0}, "beam=0 must be at least 1"),
        ({"max_response_len": 0}, "max_response_len=0 must be at least 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        model(**options)
