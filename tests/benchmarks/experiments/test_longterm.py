import json
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.experiments.longterm import read
from lit_effattn import Transformer
from lit_effattn.attention import InfiniteAttention, TransformerXLAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import SortingTask, TextStream
from lit_effattn.tasks import LanguageModel

SIZES = {"mem_len": 4, "segment_len": 4, "n_basis": 6, "widths": (0.1,), "n_samples": 5, "n_bins": 8}
INFINITE = partial(InfiniteAttention, **SIZES)


def model(attention=INFINITE, n_layers: int = 2, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Transformer(8, 2, n_layers, attention=attention, positions=None), 11, **options).eval()


def tokens(n: int) -> torch.Tensor:
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("n", "sticky"), [(13, False), (15, True), (24, False)])
@torch.no_grad()
def test_what_is_read_is_what_one_pass_over_the_stream_does(n: int, sticky: bool):
    """The last updates are before the positions 12, 12 and 20; at these, the old signal goes to t → τ t."""
    made = model(partial(INFINITE, sticky=sticky))
    given = tokens(n)
    readings = read(made, given, 1)
    assert [reading.layer for reading in readings] == ["blocks.0.attention", "blocks.1.attention"]
    x = made.embedding(given[None])
    last = 20 if n == 24 else 12
    _, before = made.backbone(x[:, :last])
    _, after = made.backbone(x[:, : last + 1])
    _, end = made.backbone(x)
    grid = (torch.arange(1000) + 0.5) / 1000
    for number, reading in enumerate(readings):
        attention = made.backbone.blocks[number].attention
        state = before.layers[number]
        at = attention.sample_times(state).flatten()
        torch.testing.assert_close(reading.before, attention.signal(state, at)[0])
        new = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]) / 2
        torch.testing.assert_close(reading.after, attention.signal(after.layers[number], new)[0])
        torch.testing.assert_close(reading.signal, attention.signal(end.layers[number], grid)[0])
        if not sticky:
            torch.testing.assert_close(at * attention.tau, new)

    first = made.backbone.blocks[0]
    density = first.attention.density(first.norm_1(x[:, -1:]), end.layers[0], grid)[0, :, 0]
    torch.testing.assert_close(readings[0].density, density)


@torch.no_grad()
def test_densities_are_the_mean_over_the_positions_and_the_update_is_the_last():
    made = model(n_layers=1)
    attention, norm = made.backbone.blocks[0].attention, made.backbone.blocks[0].norm_1
    given = tokens(24)
    (reading,) = read(made, given, 9)  # the positions 15 … 23, before two of which there is an update
    grid = (torch.arange(1000) + 0.5) / 1000
    x, state, densities = made.embedding(given[None]), None, []
    for i in range(24):
        before = state
        _, state = made.backbone(x[:, i : i + 1], state)
        densities.append(attention.density(norm(x[:, i : i + 1]), state.layers[0], grid)[0, :, 0])
        if i == 20:
            old = attention.signal(before.layers[0], attention.sample_times(before.layers[0]))[0]
    torch.testing.assert_close(reading.density, torch.stack(densities[15:]).mean(0))
    torch.testing.assert_close(reading.before, old)


def test_layers_without_a_signal_are_left_out_and_the_memory_is_that_of_evaluation():
    kinds = [partial(TransformerXLAttention, mem_len=4), INFINITE, partial(INFINITE, n_basis=0)]
    made = model(kinds, n_layers=3, eval_mem_len=8)
    (reading,) = read(made, tokens(17))
    assert reading.layer == "blocks.1.attention"
    assert made.backbone.blocks[1].attention.mem_len == 4
    with pytest.raises(ValueError, match="mem_len=8 and segment_len=4 this needs 17 tokens"):
        read(made, tokens(16))
    assert not made.backbone.blocks[1].attention._forward_hooks


def checkpoint(folder, data, attention=INFINITE):
    made = LanguageModel(Transformer(8, 2, 1, attention=attention, positions=None), data.vocab_size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 0, "enable_model_summary": False}
    trainer = pl.Trainer(**options, **quiet, callbacks=[MemoryCarry()])
    trainer.fit(made, data)
    trainer.save_checkpoint(folder / "model.ckpt")
    return folder / "model.ckpt"


@pytest.mark.parametrize("task", ["text", "sorting"])
def test_table_and_picture(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if task == "text":
        data, n = TextStream(max_bytes=100_000, segment_len=8, batch_size=2), 50
    else:
        data, n = SortingTask(20, n_types=3, segment_len=8, batch_size=2, n_train=2), 23
    path = checkpoint(tmp_path, data)
    words = ["longterm", "--ckpt_path", str(path), "--tokens", "50", "--device", "cpu", "--output", str(tmp_path)]
    command.main(words)
    rows = json.loads((tmp_path / "longterm.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["layer"], row["head"]) for row in rows] == [("blocks.0.attention", head) for head in range(2)]
    for row in rows:
        parts = [value for column, value in row.items() if column.startswith("t .")]
        assert len(parts) == 10
        assert sum(parts) + row["beyond"] == pytest.approx(100)
        assert sum(parts[:5]) == pytest.approx(row["before τ"])
        assert row["old signal lost"] > 0
    assert (tmp_path / "longterm.png").stat().st_size > 10_000
    assert f"{n} tokens of the test data" in capsys.readouterr().out


def test_what_has_no_long_term_memory_is_refused(tmp_path):
    data = SortingTask(20, n_types=3, segment_len=8, batch_size=2, n_train=2)
    path = checkpoint(tmp_path, data, partial(TransformerXLAttention, mem_len=4))
    with pytest.raises(ValueError, match="no layer has a long-term memory; choose"):
        command.main(["longterm", "--ckpt_path", str(path), "--device", "cpu"])
