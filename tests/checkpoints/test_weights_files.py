"""Checkpoints as safetensors files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_effattn import Transformer
from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.checkpoints.io import read_checkpoint, read_outline, saved_model
from lit_effattn.checkpoints.loading import load_model
from lit_effattn.checkpoints.shipped import metadata
from lit_effattn.checkpoints.trust import NotAllowedError
from lit_effattn.checkpoints.weights_files import write_weights_file
from lit_effattn.hparams import spec
from lit_effattn.tasks import LanguageModel
from tests.support.commands import same

SAVED: dict[str, Any] = {
    **{"epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.6.0"},
    "TextStream": {"digest": "abc"},
    "optimizer_states": [{"state": torch.zeros(2)}],
}


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(Transformer(8, 2, 1), 5, label_smoothing=0.25, tie=True)


def written(path: Path, model: LanguageModel, **options: Any) -> Path:
    write_weights_file(path, model.state_dict(), spec(model), "0.2.0", **options)
    return path


def test_a_file_is_a_checkpoint_without_the_state_of_training(tmp_path: Path, model: LanguageModel):
    path = written(tmp_path / "x.safetensors", model, saved=SAVED, dtype=torch.float16)
    for checkpoint in (read_checkpoint(path), read_outline(path, verify=True)):
        assert saved_model(checkpoint) == spec(model)
        assert {k: v for k, v in SAVED.items() if k != "optimizer_states"}.items() <= checkpoint.items()
        assert "optimizer_states" not in checkpoint
        assert same(checkpoint["state_dict"], {n: t.half() for n, t in model.state_dict().items()})
    loaded = load_model(LanguageModel, path)
    assert loaded.label_smoothing == 0.25
    assert same(loaded.state_dict(), {n: t.half().float() for n, t in model.state_dict().items()})
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode  # safetensors lets the owner alone read


def test_a_file_without_a_run_holds_the_model_alone(tmp_path: Path, model: LanguageModel):
    path = written(tmp_path / "x.safetensors", model)
    assert same(load_model(LanguageModel, path).state_dict(), model.state_dict())
    assert saved_model(read_checkpoint(path)) == spec(model)


def test_tensors_of_the_state_of_the_data_are_kept(tmp_path: Path, model: LanguageModel):
    """Such as the statistics of the training recordings, and what `predict --stream` reads beside them."""
    statistics = torch.tensor([[1 / 3, -torch.inf], [0.1, 7.0]], dtype=torch.double)
    state = {"statistics": statistics, "counts": [torch.arange(3)], "phones": ["a"]}
    options = {"sample_rate": 8000}
    saved = SAVED | {"TextStream": state, "datamodule_hyper_parameters": options}
    checkpoint = read_checkpoint(written(tmp_path / "x.safetensors", model, saved=saved))
    read = checkpoint["TextStream"]
    assert read["statistics"].equal(statistics)
    assert read["statistics"].dtype == torch.double
    assert read["counts"][0].equal(torch.arange(3))
    assert read["phones"] == ["a"]
    assert checkpoint["datamodule_hyper_parameters"] == options


def test_a_weight_that_a_type_cannot_hold_is_named(tmp_path: Path, model: LanguageModel):
    with torch.no_grad():
        model.embedding.weight[0, 0] = 70_000  # type: ignore[index, operator]
    with pytest.raises(ValueError, match=r"dtype=float16: embedding\.weight has values that are too large"):
        written(tmp_path / "x.safetensors", model, dtype=torch.float16)


def test_damaged_metadata_are_described(tmp_path: Path, model: LanguageModel):
    for change, words in [
        ({"checkpoint": [1]}, "checkpoint is a list of 1, not a mapping"),
        ({"checkpoint": {"x": [{"tensor": [[1], 2], "dtype": "int64"}]}}, "a tensor in its metadata is invalid"),
        ({"checkpoint": {"x": {"tensor": [1], "dtype": "float"}}}, "a tensor in its metadata is invalid: 'float'"),
        ({"model": {"class_path": "x.Y", "init_args": "z"}}, r"model\.init_args is the text 'z', not a mapping"),
    ]:
        path = written(tmp_path / "x.safetensors", model, saved=SAVED)
        about = metadata(path) | change
        save_file(load_file(path), path, {"lit_effattn": json.dumps(about)})
        with pytest.raises(DamagedError, match=f"x.safetensors can't be read as a checkpoint: .*{words}"):
            read_checkpoint(path)


def test_a_cut_file_is_damaged(tmp_path: Path, model: LanguageModel):
    path = written(tmp_path / "x.safetensors", model)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"x\.safetensors can't be read as a checkpoint: .* is damaged"):
        read_checkpoint(path)


def test_a_file_may_name_only_listed_classes(tmp_path: Path, model: LanguageModel):
    path = written(tmp_path / "x.safetensors", model)
    for name in ("os.system", "unknown_module.Model"):
        about = metadata(path) | {"model": {"class_path": name, "init_args": {"command": "echo"}}}
        save_file(load_file(path), path, {"lit_effattn": json.dumps(about)})
        with pytest.raises(NotAllowedError, match=f"x.safetensors names '{name}' as model"):
            load_model(LanguageModel, path)
