"""Masked language models: what is masked, what a position sees, BERT, resuming, predictions and fine-tuning."""

import csv
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from torch import nn

from lit_effattn import LSTM, MaskedLanguageModel, Transformer
from lit_effattn.attention import GatedDeltaNetAttention, LinearAttention, PerformerAttention, SoftmaxAttention
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.cli import main
from lit_effattn.datamodules import IGNORE, TextStream, TokenBatch
from lit_effattn.datamodules.common.packing import pack
from lit_effattn.datamodules.text.tokenizers import BPETokenizer
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.tasks.masked import uniform
from tests.support.commands import assert_same_end, fails, last, spec

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
V = 26
KINDS = {
    "softmax": SoftmaxAttention,
    "performer": PerformerAttention,
    "linear": LinearAttention,
    "delta": GatedDeltaNetAttention,
}


def sequences(n: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice([*LETTERS], rng.integers(1, 40))) for _ in range(n)]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed, (split, n) in enumerate({"train": 60, "val": 12, "test": 40}.items()):
        folder = tmp_path / "proteins" / split
        folder.mkdir(parents=True)
        texts = enumerate(sequences(n, seed))
        (folder / "x.fasta").write_text("".join(f">{split}|{i} =a protein\n{s}\n" for i, s in texts))
    return tmp_path / "proteins"


def stream(root: Path, **options: Any) -> TextStream:
    options = {"tokens": "amino_acids", "documents": "whole", "segment_len": 48, "batch_size": 4, **options}
    data = TextStream("files", root=str(root), **options)
    data.prepare_data()
    data.setup("test")
    return data


def model(backbone: Any = None, **options: Any) -> MaskedLanguageModel:
    torch.manual_seed(0)
    backbone = backbone or Transformer(16, 2, 1, causal=False)
    return MaskedLanguageModel(backbone, V, **options).double().eval()


@pytest.mark.parametrize("seed", [0, 1, 2**70])
def test_uniform_is_splitmix64(seed: int):
    def reference(i: int) -> float:
        z = ((i + 1) * 0x9E3779B97F4A7C15 + seed * 0x9E6C63D0676A9A99) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31 & 2**64 - 1) >> 40

    numbers = torch.tensor([0, 1, 2, 12345, 2**40])
    expected = [reference(int(i)) % 2**24 / 2**24 for i in numbers]
    assert uniform(seed, numbers).tolist() == expected


@pytest.mark.parametrize("training", [True, False])
def test_the_shares_of_the_masks(training: bool):
    """Within five standard deviations."""
    n = 200_000
    tokens = torch.randint(20, (4, n // 4))
    batch, task = TokenBatch(tokens, tokens, offsets=torch.arange(n).view(4, -1)), model().train(training)
    drawn = []
    for dtype in (torch.bfloat16, torch.float32):  # the default of precision=bf16-true, and of others
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            drawn.append(task.masked(batch))
        finally:
            torch.set_default_dtype(torch.float32)
    shown, targets = drawn[0]
    assert torch.equal(shown, drawn[1][0])
    scored = targets != IGNORE
    assert torch.equal(targets[scored], tokens[scored])
    assert torch.equal(shown[~scored], tokens[~scored])
    shown, true = shown[scored], tokens[scored]
    masked, same = shown == V - 1, shown == true
    n_scored = len(shown)
    kept = 0.1 + 0.1 / (V - 1)  # a random token may be the true one
    for count, total, share in ((n_scored, n, 0.15), (masked.sum(), n_scored, 0.8), (same.sum(), n_scored, kept)):
        assert abs(int(count) - total * share) < 5 * math.sqrt(total * share * (1 - share))
    random = shown[~masked & ~same]
    assert int(random.max()) < V - 1
    assert len(random.unique()) == V - 1


def masks(task: MaskedLanguageModel, data: TextStream) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for batch in data.test_dataloader():
        valid = batch.targets != IGNORE
        columns = (t[valid].tolist() for t in (batch.offsets, *task.masked(batch)))
        new = {offset: pair for offset, *pair in zip(*columns, strict=True)}
        assert not new.keys() & found.keys()
        found |= new
    return found


def test_the_masks_and_the_score_of_a_test_do_not_depend_on_how_it_is_divided(root: Path):
    task = model()
    divisions = [{"eval_batch_size": size, "documents": d} for size in (1, 7, 32) for d in ("whole", "apart")]
    divisions += [{"num_workers": 2}, {"eval_segment_len": 200}]
    data = [stream(root, **options) for options in divisions]
    expected = masks(task, data[0])
    assert len(expected) == data[0]._store.n_tokens["test"]
    assert 0 < sum(target != IGNORE for _, target in expected.values()) < len(expected) / 4
    for other in data[1:]:
        assert masks(task, other) == expected
    halves = []
    for rank in range(2):
        half = stream(root)
        half.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": rank})
        halves.append(masks(task, half))
    assert halves[0] | halves[1] == expected
    assert not halves[0].keys() & halves[1].keys()
    assert masks(model(seed=1), data[0]) != expected

    def score(of: TextStream) -> dict[str, float]:
        task = model()
        with torch.no_grad():
            metrics = [task.score("test", batch) for batch in of.test_dataloader()][-1]
        return {name: float(metric.compute()) for name, metric in metrics.items()}

    first = score(data[0])
    assert first["tokens"] == sum(target != IGNORE for _, target in expected.values())
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    for other in data[1:6]:  # documents are as long as a segment at most
        assert score(other) == pytest.approx(first, rel=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "lstm"])
def test_a_position_sees_its_document_alone_and_all_of_it(kind: str):
    torch.manual_seed(0)
    backbone: Any = LSTM(16, 1, causal=False)
    if kind != "lstm":
        backbone = Transformer(16, 2, 2, attention=KINDS[kind], causal=False, positions="auto")
    task = model(backbone)
    tokens = torch.randint(V - 1, (1, 12))
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 4, 9]] = True
    before = task(tokens, starts=starts)
    changed = tokens.index_copy(1, torch.tensor([5]), (tokens[:, 5:6] + 1) % (V - 1))
    moved = (task(changed, starts=starts) != before).any(-1)[0]
    assert moved.tolist() == [4 <= i < 9 for i in range(12)]
    torch.testing.assert_close(task(tokens[:, 4:9])[0], before[0, 4:9])
    batch = TokenBatch(tokens, tokens, torch.tensor([12]), starts=starts, offsets=torch.arange(12)[None])
    assert (task.masked(batch)[1] != IGNORE).any()
    assert torch.isfinite(task.objective(batch).loss)


def test_a_model_that_copies_its_input_is_right_by_chance_alone(root: Path):
    """Only where the masks leave a token, or draw it again: there is no other way from target to output."""
    copies = Transformer(V, 2, 1, causal=False, positions=None, norm="post")
    copies.forward = lambda x, state=None, lengths=None: (x, None)  # type: ignore[method-assign]
    for share, kept in ((0.8, 0.1), (1.0, 0.0)):
        task = model(copies, mask_share=share, random_share=0.1 if share < 1 else 0.0)
        task.embedding.weight.data = torch.eye(V).double()
        task.head.proj.weight.data, task.head.proj.bias.data = torch.eye(V).double(), torch.zeros(V).double()
        shown_and_true = [
            (shown[targets != IGNORE], targets[targets != IGNORE])
            for shown, targets in (task.masked(batch) for batch in stream(root, documents="apart").test_dataloader())
        ]
        shown, true = (torch.cat(side) for side in zip(*shown_and_true, strict=True))
        for batch in stream(root, documents="apart").test_dataloader():
            metrics = task.score("test", batch)
        accuracy = float(metrics["accuracy"].compute())
        assert accuracy == pytest.approx(float((shown == true).double().mean()))
        assert abs(accuracy - kept) < 5 * math.sqrt(0.1 * 0.9 / len(true))


def bert() -> tuple[Any, MaskedLanguageModel]:
    """A BERT of transformers with random weights, and the same model here."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=20,
        attn_implementation="eager",
    )
    theirs = transformers.BertForMaskedLM(config).double().eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    backbone = Transformer(
        16,
        4,
        2,
        24,
        causal=False,
        positions=partial(LearnedPositions, max_len=20),
        norm="post",
        norm_eps=1e-12,
        input_norm=True,
    )
    ours, untied = (model(backbone, tie=tie, head=partial(CategoricalHead, transform=True)) for tie in (True, False))
    assert ours.head.proj.weight is ours.embedding.weight
    assert untied.head.proj.weight is not untied.embedding.weight
    embeddings, head = theirs.bert.embeddings, theirs.cls.predictions
    pairs = {
        "embedding.weight": embeddings.word_embeddings.weight,
        # There is one type of token, whose vector is added everywhere.
        "backbone.positions.table.weight": embeddings.position_embeddings.weight
        + embeddings.token_type_embeddings.weight[0],
        "head.proj.weight": embeddings.word_embeddings.weight,
        "head.proj.bias": head.bias,
    }
    modules = {
        "backbone.input_norm": embeddings.LayerNorm,
        "head.transform.0": head.transform.dense,
        "head.transform.2": head.transform.LayerNorm,
    }
    for i, layer in enumerate(theirs.bert.encoder.layer):
        block, attention = f"backbone.blocks.{i}", layer.attention
        for name in ("q", "k", "v"):
            full = {"q": "query", "k": "key", "v": "value"}[name]
            modules[f"{block}.attention.{name}_proj"] = getattr(attention.self, full)
        modules |= {
            f"{block}.attention.out_proj": attention.output.dense,
            f"{block}.norm_1": attention.output.LayerNorm,
            f"{block}.feed_forward.up": layer.intermediate.dense,
            f"{block}.feed_forward.down": layer.output.dense,
            f"{block}.norm_2": layer.output.LayerNorm,
        }
    for name, module in modules.items():
        pairs |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    assert pairs.keys() == ours.state_dict().keys()
    ours.load_state_dict(pairs)
    return theirs, ours


@torch.no_grad()
def test_the_logits_are_those_of_bert():
    theirs, ours = bert()
    tokens, lengths = torch.randint(V, (3, 20)), torch.tensor([20, 13, 1])
    valid = torch.arange(20) < lengths[:, None]
    expected = theirs(tokens, attention_mask=valid.long()).logits.log_softmax(-1)
    found = ours(tokens, lengths)
    assert float((found - expected)[valid].abs().max()) < 1e-12
    packed = pack(TokenBatch(tokens, tokens, lengths))
    found = ours(packed.inputs, starts=packed.starts)[0]
    assert float((found - expected[valid]).abs().max()) < 1e-12


def test_what_is_refused():
    for options, words in (
        ({"mask_rate": 0.0}, "mask_rate must be above 0"),
        ({"mask_share": 0.8, "random_share": 0.3}, "at most 1 together"),
        ({"backbone": Transformer(16, 2, 1)}, "set causal=False"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**options)
    tokens = torch.full((1, 3), V)
    with pytest.raises(ValueError, match="target 26"):
        model().check_batch(TokenBatch(tokens, tokens))


# ------------------------------------------------------------------------------------------------------- the command

TINY: dict[str, Any] = {
    "seed_everything": 3,
    "model": spec(
        "MaskedLanguageModel",
        backbone=spec(
            "Transformer",
            d_model=16,
            n_heads=2,
            n_layers=1,
            causal=False,
            attention=spec("PerformerAttention", features="relu"),
            dropout=0.2,
        ),
        optimizer=spec("torch.optim.AdamW", lr=0.003),
    ),
    "data": spec(
        "TextStream",
        source="files",
        root="proteins",
        tokens="amino_acids",
        documents="whole",
        segment_len=48,
        batch_size=4,
        shuffle_seed=0,
    ),
    "trainer": {"max_epochs": 2, "enable_progress_bar": False, "logger": False},
}


def fit(*args: str, **settings: Any) -> Path:
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, **settings}))
    main(["fit", "--config", "tiny.yaml", *args])
    return last("runs").parent.parent


def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(root: Path):
    whole = fit()
    steps = torch.load(last("runs"), weights_only=True)["global_step"]
    assert steps > 10
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "part", "--trainer.max_steps", "7"])
    main(["fit", "--ckpt_path", str(last("part")), "--trainer.max_steps", "-1"])
    assert steps % 2 == 0
    assert_same_end(whole / "checkpoints" / "last.ckpt", last("part"))


def test_scores_of_documents_tokens_of_masks_and_classes_of_proteins(
    root: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    run = fit("--trainer.max_epochs", "1")
    main(["test", "--ckpt_path", "last"])
    out = capsys.readouterr().out
    main(["predict", "--ckpt_path", "last"])
    (path,) = run.rglob("predictions.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["title"] for row in rows] == [f"test|{i} =a protein" for i in range(40)]
    scored = [
        (int(row["targets"]), float(row["perplexity"]), float(row["accuracy"])) for row in rows if row["accuracy"]
    ]
    n = sum(count for count, *_ in scored)
    assert f"test tokens: {n}" in out
    assert f"test loss: {sum(count * math.log(p) for count, p, _ in scored) / n:.4f}" in out
    assert f"test accuracy: {sum(count * a for count, _, a in scored) / n:.4f}" in out

    text = "MK[MASK]LVA[MASK]"
    main(["generate", "--ckpt_path", "last", "--fill", text, "--n", "25"])
    (written,) = run.rglob("samples.txt")
    first, *lines = written.read_text().splitlines()
    assert first == text
    assert lines == [line for line in capsys.readouterr().out.splitlines() if line.startswith("[MASK] ")]
    task = MaskedLanguageModel.load_from_checkpoint(last("runs")).eval()
    letters = "ABCDEFGHIKLMNOPQRSTUVWXYZ"
    ids = [letters.index(c) if c in letters else V - 1 for c in text.replace("[MASK]", "?")]
    expected = task(torch.tensor([ids])).exp()[0]
    for i, place in enumerate((2, 6)):
        pairs = [part.split() for part in lines[i].partition(": ")[2].split(", ")]
        assert [float(p) for _, p in pairs] == sorted((float(p) for _, p in pairs), reverse=True)
        for letter, p in pairs:
            assert float(p) == pytest.approx(float(expected[place, letters.index(letter.strip("'"))]), abs=1e-4)
    with pytest.warns(UserWarning, match=r"the text has '\*', read as X"):
        main(["generate", "--ckpt_path", "last", "--fill", "*[MASK]"])
    assert "has no [MASK]" in fails(capsys, "generate", "--ckpt_path", "last", "--fill", "MKLV")
    assert "--fill is missing" in fails(capsys, "generate", "--ckpt_path", "last")

    for split in ("train", "val", "test"):
        lines = [json.dumps({"text": s, "label": "W" if "W" in s else "no W"}) for s in sequences(30, 5)]
        Path("labelled", f"{split}.jsonl").parent.mkdir(exist_ok=True)
        Path("labelled", f"{split}.jsonl").write_text("\n".join(lines))
    checkpoint = "pretrained.ckpt"
    last("runs").rename(checkpoint)
    data = spec("LabelledTexts", root="labelled", tokenizer_of=checkpoint)
    options = {**TINY["model"]["init_args"], "optimizer": spec("torch.optim.SGD", lr=0.0)}
    classifier = spec("SequenceClassifier", **options)
    tuned = {"model": classifier, "data": data, "trainer": {**TINY["trainer"], "max_steps": 1, "max_epochs": -1}}
    fit("--init_weights", checkpoint, **tuned)
    assert "kept as this model initialised them: output.weight (1×), output.bias (1×)" in caplog.text
    weights = torch.load(last("runs"), weights_only=True)["state_dict"]
    for name, value in task.state_dict().items():
        if name.startswith(("embedding.", "backbone.")):
            assert torch.equal(weights[name], value)
    other = torch.load(checkpoint, weights_only=True)
    other["hyper_parameters"]["tokenizer"] = json.dumps({"tokens": "characters", "vocabulary": letters[-2::-1]})
    torch.save(other, "other.ckpt")
    data["init_args"]["tokenizer_of"] = "other.ckpt"
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, **tuned}))
    message = fails(capsys, "fit", "--config", "tiny.yaml", "--init_weights", checkpoint)
    assert "--init_weights pretrained.ckpt: its tokens are not those of the data" in message
    del data["init_args"]["tokenizer_of"]
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, **tuned}))
    message = fails(capsys, "fit", "--config", "tiny.yaml", "--init_weights", checkpoint)
    assert "The vocabularies differ: --data.tokenizer_of" in message


def test_the_token_of_a_gap_has_the_space_before_it():
    tokenizer = BPETokenizer.learn(["the cat sat "] * 9, 280)
    first, cat, sat = tokenizer.encode("the cat sat").tolist()
    torch.manual_seed(0)
    task = MaskedLanguageModel(Transformer(16, 2, 1, causal=False), tokenizer.n_tokens, tokenizer.to_json()).eval()
    expected = task(torch.tensor([[first, task.mask, sat]])).exp()[0, 1].tolist()
    (filled,) = task.fill("the [MASK] sat", tokenizer.n_tokens)
    assert dict(filled)[" cat"] == pytest.approx(expected[cat])


def test_batches_without_offsets_are_scored_by_rows(tmp_path: Path):
    task = model()
    x = torch.randint(V - 1, (2, 30))
    batches = [TokenBatch(x, x), TokenBatch(x[:1], x[:1])]
    targets = task.masked(batches[0])[1]
    assert torch.equal(targets[:1], task.masked(batches[1])[1])
    padded = torch.cat([x[:1], torch.full((1, 3), IGNORE)], 1)
    assert torch.equal(targets[:1], task.masked(TokenBatch(padded, padded))[1][:, :30])
    scored = targets != IGNORE
    assert not torch.equal(scored[0], scored[1])  # other rows have other masks
    message = task.write_predictions([task.predict_step(batch) for batch in batches], tmp_path)
    assert message.startswith("scores of 3 documents")
    rows: list[list[str]] = [line.split(",") for line in (tmp_path / "predictions.csv").read_text().splitlines()]
    assert rows[0] == ["index", "targets", "perplexity", "accuracy"]
    assert rows[1][1:] == rows[3][1:]
