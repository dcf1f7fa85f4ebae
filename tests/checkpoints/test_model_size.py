"""A model that a file describes is not larger than the file, and that is known before memory or time is spent."""

import time
from pathlib import Path

import pytest
import torch

from lit_effattn import LanguageModel, PixelModel
from lit_effattn.checkpoints.model_size import _AT_ONCE, model_of, size_of
from tests.support.commands import fails
from tests.support.small_runs import checkpoint


def test_what_is_too_large_is_not_made():
    for make in [
        lambda: torch.empty(2**40),
        lambda: torch.zeros(2**20, 2**20),
        lambda: torch.ones(2**40, dtype=torch.int8),
        lambda: torch.full((2**40,), 1.0),
        lambda: torch.randn(2**40),
        lambda: torch.randint(5, (2**40,)),
        lambda: torch.arange(2**40),
        lambda: torch.arange(0, 2**40, 2),
        lambda: torch.linspace(0, 1, 2**40),
        lambda: torch.eye(2**20),
        lambda: torch.nn.Linear(2**20, 2**20),
        lambda: torch.zeros(3).new_zeros(2**40),
        lambda: torch.empty(10**30),
        lambda: [torch.empty(2**27) for _ in range(100)],
        lambda: [torch.nn.Linear(1, 1) for _ in range(10**8)],
    ]:
        begun = time.process_time()
        with (
            torch.device("meta"),
            pytest.raises(ValueError, match=r"it\.ckpt describes a larger model"),
            model_of("it.ckpt", 100, 1),
        ):
            make()
        assert time.process_time() - begun < 30


def test_what_is_not_is_made():
    with model_of("it.ckpt", 100, 1):
        layers = [torch.nn.Linear(3, 4) for _ in range(100)]
        (
            torch.arange(10),
            torch.arange(2**40, 2**40 + 3),
            torch.linspace(0, 1, 5),
            torch.eye(3),
            torch.zeros(3).expand(10**9, 3),
        )
    assert len(layers) == 100
    with torch.device("meta"), model_of("it.ckpt", _AT_ONCE, 1):
        torch.empty(_AT_ONCE)  # 4 bytes each


def test_other_errors_stay():
    with pytest.raises(RuntimeError, match="must match"), model_of("it.ckpt", 100, 1):
        torch.zeros(3) + torch.zeros(4)


def test_the_size_of_a_checkpoint():
    content = torch.load(checkpoint("pixels"), weights_only=True)
    n_bytes, n_tensors = size_of(checkpoint("pixels"))
    assert n_bytes == (checkpoint("pixels")).stat().st_size
    assert n_tensors >= len(content["state_dict"])


SIZES = [("d_model", 10**9), ("d_model", 10**30), ("n_layers", 10**8), ("d_ff", 10**12)]


def test_a_checkpoint_of_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for command, name, value in [*(("python", *size) for size in SIZES), ("generate", *SIZES[0])]:
        monkeypatch.chdir(tmp_path)
        content = torch.load(checkpoint("pixels"), weights_only=True)
        content["hyper_parameters"]["backbone"]["init_args"][name] = value
        torch.save(content, "it.ckpt")
        if command == "python":
            with pytest.raises(ValueError, match=r"it\.ckpt describes a larger model"):
                PixelModel.load_from_checkpoint("it.ckpt")
        else:
            assert "describes a larger model than it holds: with a tensor of" in fails(
                capsys, command, "--ckpt_path", "it.ckpt"
            )


def test_real_checkpoints_are_within():
    PixelModel.load_from_checkpoint(checkpoint("pixels"))
    LanguageModel.load_from_checkpoint(checkpoint("language"))
