import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import TransformerXLAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import GroundedDialogues
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.datamodules.text.dialogue_sources import Passage
from lit_effattn.datamodules.text.dialogues import DialogueStreams
from lit_effattn.tasks import LanguageModel
from tests.callbacks.tiny import trainer

START = 256
FILM = {
    "0": {"cast": ["Ann as Bo", "Cy as Di"], "director": "Ed ", "movieName": "Up", "year": "1999", "rating": []},
    "1": "Bo meets  Di. ",
    "2": "They part.",
    "3": "They return.",
    "index": 7,
}
SECTIONS = ["cast: Ann as Bo, Cy as Di\ndirector: Ed\nmovieName: Up\nyear: 1999\nrating:", "Bo meets Di.", "They part."]
HISTORY = [(0, "Hi"), (0, "\nhey\n you "), (0, " "), (1, "Bo!"), (1, "yes"), (2, "sad…")]
TURNS = ["Hi", "hey you", "Bo!", "yes", "sad…"]


def conversation(history: list[tuple[int, Any]] = HISTORY, film: int = 7, key: str = "wikiDocumentIdx") -> dict:
    turns = [{"docIdx": i, "text": text, "uid": "user1", "utcTimestamp": "2018"} for i, text in history]
    return {"date": "2018-03-01T00:11:05.970Z", "history": turns, "rating": 2, "whoSawDoc": ["user1"], key: film}


def write(root: Path, n: int = 3, **more: Any) -> Path:
    """Make a folder in the format of CMU DoG: `n` conversations a split, and `more` in the training folder."""
    files = {"WikiData/Up.json": FILM, **{f"Conversations/train/{name}.json": data for name, data in more.items()}}
    for split in ("train", "valid", "test"):
        for i in range(n):
            files[f"Conversations/{split}/{i}.json"] = conversation([*HISTORY, (2, f"{split} {i}")])
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return root


def data(root: Path, **options: Any) -> GroundedDialogues:
    return GroundedDialogues(str(root), cache=str(root / "cache"), **options)


def read(made: GroundedDialogues, split: str = "test") -> list[tuple[str, list[str]]]:
    """Put streams of one row together: of each conversation its text with | for <start>, and the scored parts."""
    actual: list[tuple[list[int], list[list[int]]]] = []
    for batch in getattr(made, f"{split}_dataloader")():
        n = batch.inputs.size(1) if batch.lengths is None else int(batch.lengths)
        if batch.fresh:
            actual.append(([], []))
        tokens, parts = actual[-1]
        for token, target in zip(batch.inputs[0, :n].tolist(), batch.targets[0, :n].tolist(), strict=True):
            if target != IGNORE and token == START:
                parts.append([])
            tokens.append(token)
            if target != IGNORE:
                parts[-1].append(target)
    return [(text(tokens), [text(part) for part in parts]) for tokens, parts in actual]


def text(tokens: list[int]) -> str:
    return b"".join(b"|" if token == START else bytes([token]) for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("segment_len", [7, 1000])
def test_sections_come_before_the_turns_and_only_turns_are_scored(tmp_path: Path, segment_len: int):
    again = conversation([*HISTORY, (2, "test 0"), (0, "back")])
    (write(tmp_path, 1) / "Conversations" / "test" / "0.json").write_text(json.dumps(again))
    turns = [*TURNS, "test 0", "back"]
    a, b, c = SECTIONS
    expected = {
        "before": [([a, b, c, *turns], turns)],
        "when_shown": [([a, *turns[:2], b, *turns[2:4], c, *turns[4:6], a, turns[6]], turns)],
        "apart": [
            *(([a, *turns[:2]], turns[:2]), ([b, *turns[2:4]], turns[2:4])),
            *(([c, *turns[4:6]], turns[4:6]), ([a, turns[6]], turns[6:])),
        ],
    }
    for document, conversations in expected.items():
        actual = read(data(tmp_path, document=document, segment_len=segment_len, batch_size=1))
        assert actual == [("|" + "|".join(all_), [t + "|" for t in scored]) for all_, scored in conversations]


def test_responses_say_where_each_turn_begins(tmp_path: Path):
    """At a position from which its first token is predicted, once in all segments and on all processes."""
    write(tmp_path, 5)
    for split, batch_size in (("train", 1), ("test", 2)):
        made = data(tmp_path, document="before", segment_len=10, batch_size=batch_size)
        name = {"train": "train", "test": "test"}[split]
        actual = []
        for batch in getattr(made, f"{split}_dataloader")():
            for row, of_row in enumerate(batch.responses):
                for r in of_row:
                    assert batch.inputs[row, r.position] == START
                    assert batch.targets[row, r.position] == r.text.encode()[0]
                    actual.append((r.number, r.text))
        assert sorted(actual) == list(enumerate([t for i in range(5) for t in [*TURNS, f"{name} {i}"]]))


def n_scored(made: GroundedDialogues) -> int:
    return int(made._streams("test", 1, 1).scored.sum())


def test_no_stream_begins_within_a_conversation(tmp_path: Path):
    write(tmp_path, 5)
    made = data(tmp_path, segment_len=9, batch_size=2)
    n = n_scored(made)
    assert n == sum(len((t + "|").encode()) for i in range(5) for t in [*TURNS, f"test {i}"])
    seen = 0
    for rank in range(2):
        made.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
        batches = list(made.test_dataloader())
        seen += sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        for row in range(2):
            first = [bool(batch.fresh[row]) for batch in batches]
            assert first[0]
            for batch, is_fresh in zip(batches, first, strict=True):
                if is_fresh:  # a section's first token is read after <start>, and not scored
                    assert batch.inputs[row, 0] == START
                    assert batch.targets[row, 0] == IGNORE
    assert seen == n


def test_memory_reaches_from_the_document_through_all_turns_and_no_further(tmp_path: Path):
    write(tmp_path)
    torch.manual_seed(0)
    backbone = Transformer(8, 2, 1, attention=lambda d, h, c: TransformerXLAttention(d, h, c, mem_len=300))
    model = LanguageModel(backbone, START + 1, embedding_std=1.0).double().eval()
    scores = []
    for segment_len in (11, 300):
        made = data(tmp_path, document="before", segment_len=segment_len, batch_size=1)
        scores.append(trainer(tmp_path, callbacks=[MemoryCarry()]).test(model, made, verbose=False)[0])
    assert scores[0]["test/perplexity"] == pytest.approx(scores[1]["test/perplexity"], rel=1e-9)
    alone = [model(batch)[batch.targets != IGNORE] for batch in made.test_dataloader()]
    assert scores[0]["test/perplexity"] == pytest.approx(torch.cat(alone).mean().exp().item(), rel=1e-9)
    predictor = trainer(tmp_path, callbacks=[MemoryCarry()])
    model.write_predictions(predictor.predict(model, made), tmp_path)  # a line a conversation
    _, *lines = (tmp_path / "predictions.csv").read_text().splitlines()
    for i, (line, nats) in enumerate(zip(lines, alone, strict=True)):
        bits = nats.mean().item() / math.log(2)
        assert [float(cell) for cell in line.split(",")] == pytest.approx([i, len(nats), bits], rel=1e-5)


def test_training_takes_all_conversations_whole(tmp_path: Path):
    made = data(write(tmp_path, 4), segment_len=9, batch_size=1)
    assert [scored for _, scored in read(made, "train")] == [scored for _, scored in read(made, "train")]
    assert sum(len(scored) for _, scored in read(made, "train")) == 4 * (len(TURNS) + 1)
    fit = trainer(tmp_path, callbacks=[MemoryCarry()], max_epochs=1)
    backbone = Transformer(8, 2, 1, attention=lambda d, h, c: TransformerXLAttention(d, h, c, mem_len=4))
    fit.fit(LanguageModel(backbone, START + 1), data(tmp_path, segment_len=9, batch_size=3))
    assert fit.state.finished


@pytest.mark.parametrize("batch_size", [1, 3])
def test_packed_conversations_are_those_apart_without_padding(tmp_path: Path, batch_size: int):
    """Memory is carried, so that every response has the loss that it has apart; evaluation stays apart."""
    write(tmp_path, 5, long=conversation([(0, "a long conversation " * 9), *HISTORY]))
    torch.manual_seed(0)
    backbone = Transformer(8, 2, 1, attention=lambda d, h, c: TransformerXLAttention(d, h, c, mem_len=400))
    model = LanguageModel(backbone, START + 1, embedding_std=1.0).double().eval()
    sums, batches = [], []
    for packed in (False, True):
        made = data(tmp_path, document="when_shown", segment_len=20, batch_size=batch_size, packed=packed)
        memory, total, batches = backbone.initial_state(batch_size), 0.0, list(made.train_dataloader())
        for batch in batches:
            memory = backbone.reset(memory, batch.fresh)
            with torch.no_grad():
                total += float(model(batch, memory).sum())
                memory = model.objective(batch, memory).state
        sums.append(total)
        assert not packed or n_scored(made) == n_scored(data(tmp_path, document="when_shown"))
        assert all(batch.starts is None for batch in made.val_dataloader())
    assert sums[1] == pytest.approx(sums[0], rel=1e-12)
    for row in range(batch_size):  # no padding but at a stream's end, and whole conversations in each
        lengths = [20 if batch.lengths is None else int(batch.lengths[row]) for batch in batches]
        assert sorted(lengths, reverse=True) == lengths
        assert sum(0 < n < 20 for n in lengths) <= 1
        assert batches[0].starts[row, 0]
    starts = [batch.starts & (batch.inputs == START) for batch in batches]
    assert sum(int(s.sum()) for s in starts) == 6  # conversations
    assert sum(int(batch.starts.sum()) for batch in batches) == 6


def test_a_packed_run_resumes_with_the_next_segment_and_its_memory(tmp_path: Path):
    write(tmp_path, 5)
    losses: list[list[float]] = []

    class Recorder(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses[-1].append(outputs["loss"].item())
            if len(losses[-1]) == trainer.max_steps == 4:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def fit(steps: int, **options: Any) -> None:
        torch.manual_seed(0)
        losses.append([])
        backbone = Transformer(8, 2, 1, attention=lambda d, h, c: TransformerXLAttention(d, h, c, mem_len=30))
        run = trainer(tmp_path, callbacks=[MemoryCarry(), Recorder()], max_steps=steps)
        run.fit(
            LanguageModel(backbone, START + 1), data(tmp_path, segment_len=20, batch_size=2, packed=True), **options
        )

    fit(9)
    fit(4)
    fit(9, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert losses[1] + losses[2] == losses[0]
    assert len(losses[0]) == 9
    (path := next((tmp_path / "Conversations" / "train").iterdir())).write_text(path.read_text().replace("a", "b"))
    with pytest.raises(ValueError, match="trained on other data: digest="):
        fit(9, ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_bpe_is_learnt_from_sections_and_turns(tmp_path: Path):
    made = data(write(tmp_path), tokens="bpe", vocab_size=270, batch_size=1)
    assert (made.unit, made.vocab_size) == ("token", 270)
    batch = next(iter(made.train_dataloader()))
    assert isinstance(batch, TokenBatch)
    assert int(batch.inputs[0, 0]) == 269


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path):
    broken = {
        "half": "{",
        "list": [1],
        "nodoc": conversation(film=8),
        "nosection": conversation([(4, "x")]),
        "number": conversation([(0, 5)]),
        "surrogate": conversation([(0, "\ud800")]),
    }
    fine = {"empty": conversation([]), "older": conversation([(3, "old")], key="docLinkIdx")}
    made = data(write(tmp_path, 1, **broken, **fine), batch_size=1)
    with pytest.warns(UserWarning, match=r"6 left out:\n  6 unreadable:\n    .*half.json: ") as warned:
        made.setup("fit")
    assert "and 3 more" in str(warned[0].message)
    assert "nodoc.json: ValueError: its document 8 is not in WikiData" in str(warned[0].message)
    assert ("|They return.|old", ["old|"]) in read(made, "train")


def test_a_change_in_a_linked_folder_is_read(tmp_path: Path):
    linked = write(tmp_path, 1) / "Conversations" / "test"
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    for turn in ("bye", "see you"):
        (tmp_path / "elsewhere" / "0.json").write_text(json.dumps(conversation([(1, turn)])))
        assert read(data(tmp_path, batch_size=1)) == [(f"|Bo meets Di.|{turn}", [f"{turn}|"])]


def test_a_section_without_text_is_left_out(tmp_path: Path):
    write(tmp_path, 1)
    (tmp_path / "WikiData/Up.json").write_text(json.dumps({**FILM, "1": " "}))
    assert read(data(tmp_path, batch_size=1))[1] == ("|Bo!|yes", ["Bo!|", "yes|"])


def test_missing_files_are_asked_for_by_their_place(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"CMU DoG \(train, val, test, documents\) is not in .*festvox"):
        data(tmp_path / "nowhere").prepare_data()
    write(tmp_path, 1)
    (tmp_path / "Conversations/valid/0.json").write_text("[]")
    with pytest.raises(ValueError, match="valid: no conversation can be read; the first fault"):
        data(tmp_path).prepare_data()
    (tmp_path / "Conversations/valid/0.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"CMU DoG \(val\) is not in"):
        data(tmp_path).prepare_data()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"document": "after"}, "document='after' is not one of apart"),
        ({"segment_len": 0}, "segment_len=0 must be at least 1"),
        ({"tokens": "bpe"}, "vocab_size=None: tokens='bpe' needs"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        GroundedDialogues(**options)


def test_more_streams_than_conversations(tmp_path: Path):
    made = data(write(tmp_path, 1), document="before", batch_size=2)
    with pytest.raises(ValueError, match=r"batch_size=2 .* there are 1; use a smaller one"):
        made.train_dataloader()


def test_the_token_that_begins_a_text_may_be_a_small_one():
    """As in the vocabulary of a Llama."""
    tokens = np.array([300, 301, 302], np.uint16)
    passages = SimpleNamespace(rows=tokens, lengths=lambda: np.array([2, 1]))
    sizes = {"segment_len": 9, "batch_size": 1, "num_replicas": 1, "rank": 0}
    batch = DialogueStreams([[Passage("d", False), Passage("t", True)]], passages, start=1, **sizes)[0]
    assert batch.inputs[0, :5].tolist() == [1, 300, 301, 1, 302]
    assert batch.targets[0, :5].tolist() == [IGNORE, IGNORE, IGNORE, 302, 1]
