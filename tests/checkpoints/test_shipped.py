"""The shipped models: their names, their files, and what these say of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.runs import find_checkpoint, output_folder, short
from lit_effattn.checkpoints.shipped import metadata, model_name, model_path, models
from lit_effattn.tasks import Task

MOST_BYTES = 3_000_000


def test_a_name_means_a_file_of_the_package():
    path = model_path("model:digits")
    assert path == models()["digits"] == find_checkpoint("model:digits", Path("nowhere"))
    assert (model_name(path), short(path)) == ("digits", "model:digits")
    assert output_folder(path, Path("runs")) == Path("runs/model_digits")
    assert model_path("last") == Path("last")
    assert model_name("digits.safetensors") is None  # the user's own, of the same name
    assert model_name(path.with_suffix(".ckpt")) is None


def test_the_models_are_named_where_one_is_unknown():
    with pytest.raises(
        FileNotFoundError, match=r"--init_weights model:digit: .*did you mean model:digits\? there are "
    ):
        find_checkpoint("model:digit", Path(), option="--init_weights")
    with pytest.raises(FileNotFoundError, match="model:: there is no such model; there are digits"):
        read_checkpoint("model:")


def test_a_model_is_small_and_its_card_counts_its_parameters():
    for name in models():
        path = models()[name]
        assert path.stat().st_size <= MOST_BYTES
        weights, card = load_file(path), metadata(path)["card"]
        assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.float16}
        assert all(bool(t.isfinite().all()) for t in weights.values())
        model = Task.load_from_checkpoint(f"model:{name}")
        assert card["parameters"] == sum(p.numel() for p in model.parameters())
        assert next(model.parameters()).dtype == torch.float32
        assert all(torch.equal(t, weights[n].to(t.dtype)) for n, t in model.state_dict().items())


def test_files_of_other_programs_are_named(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors does not describe its model"):
        metadata(path)
    for content in ("[" * 99_999, "{", '{"model": {}}', "7"):
        save_file({"w": torch.zeros(2)}, path, {"lit_effattn": content})
        with pytest.raises(ValueError, match=r"x\.safetensors (is damaged|does not describe its model)"):
            metadata(path)
    path.write_bytes(b"PK" * 20)
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged or not in the safetensors format"):
        metadata(path)
