import json
from functools import partial

import pytest
import yaml

from benchmarks import __main__ as command
from benchmarks.experiments.sorting import short_term_reach
from lit_effattn import Transformer
from lit_effattn.attention import CompressiveAttention, InfiniteAttention, TransformerXLAttention

SIGNAL = partial(InfiniteAttention, mem_len=3, segment_len=4, n_basis=6, n_samples=4)


@pytest.mark.parametrize(
    ("attention", "segment_len", "reach"),
    [
        # Position 39 is the last: two layers, each of which sees `window` keys, its own included.
        (partial(TransformerXLAttention, mem_len=7, same_length=True), 40, 2 * 6 + 1),
        # It attends to what is newer than the last multiple of 4 before t − 3: 36 = 4 ⌊(39 − 3) / 4⌋ to 39, and the
        # layer below does so from 36 on: to 32 = 4 ⌊(36 − 3) / 4⌋. What lies before is in the signal, and left out.
        (SIGNAL, 40, 8),
        # 36 = 2 ⌊(39 − 3) / 2⌋ to 39 and two summaries of 2, which begin at 32; there the layer below has 28 to 32, and
        # two summaries that begin at 24.
        (partial(CompressiveAttention, mem_len=3, compressed_len=2, compression_rate=2), 40, 16),
        (TransformerXLAttention, 40, 40),
        # The last segment, from 30, and 5 before; in the layer below 25 has seen its segment, from 20, and 5 before.
        (partial(TransformerXLAttention, mem_len=5), 10, 25),
    ],
    ids=["xl", "infinite", "compressive", "all", "segments"],
)
def test_reach_is_how_far_gradients_go(attention, segment_len, reach):
    backbone = Transformer(d_model=8, n_heads=2, n_layers=2, attention=attention, positions=None)
    assert short_term_reach(backbone, 40, segment_len) == reach


@pytest.mark.exhaustive
@pytest.mark.processes
def test_table_of_variants_and_seeds(tmp_path, capsys):
    attention = {"class_path": "InfiniteAttention", "init_args": SIGNAL.keywords}
    backbone = {"d_model": 8, "n_heads": 2, "n_layers": 1, "attention": attention, "positions": None}
    config = {
        "model": {
            "class_path": "LanguageModel",
            "init_args": {
                "backbone": {"class_path": "Transformer", "init_args": backbone},
                "accuracy": True,
            },
        },
        "data": {
            "class_path": "SortingTask",
            "init_args": {"length": 24, "n_types": 3, "segment_len": None, "n_train": 16, "n_val": 2, "n_test": 4},
        },
        "trainer": {"default_root_dir": str(tmp_path / "runs" / "tiny"), "max_epochs": 1, "accelerator": "cpu"},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    words = f"sorting {path} --seeds 0 --vary sticky=true --device cpu --output {tmp_path / 'out'}"
    command.main(words.split())
    rows = json.loads((tmp_path / "out" / "sorting.json").read_text())["rows"]
    assert [row["configuration"] for row in rows] == ["tiny", "tiny, sticky=true"]
    for row in rows:
        assert len(row["accuracy"]["samples"]) == 1
        assert row["short-term reach, tokens"] == "4 of 24"  # at the separator, 24: from 20 = 4 ⌊(24 − 3) / 4⌋ on
        assert 0.5 < row["counting"] < 1
    assert rows[0]["state, bytes"] < rows[1]["state, bytes"]  # the histogram
    capsys.readouterr()
