"""The classes that a checkpoint may name."""

import pytest
import torch

import lit_effattn.attention
import lit_effattn.tasks
from lit_effattn import registry
from lit_effattn.hparams import HasInitArgs
from tests.support.processes import in_processes


def test_every_kind_and_task_enters_itself():
    for package in (lit_effattn.attention, lit_effattn.tasks):
        kinds = [getattr(package, name) for name in package.__all__]
        kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, HasInitArgs)]
        assert kinds
        for kind in kinds:
            assert registry.entered(f"{kind.__module__}.{kind.__qualname__}") is kind


def _has_what_models_are_made_of(rank: int) -> None:
    from tests.support.first_imports import CLASSES

    assert {"LSTM", "EncoderDecoder", "ConvSubsampling", "AdaptiveEmbedding", "BeamDecoder", "RAdam"} <= CLASSES
    assert {"WarmupCosine", "MultiStepLR", "ReduceLROnPlateau", "Embedding", "RotaryPositions", "Muon"} <= CLASSES


@pytest.mark.processes
def test_what_models_are_made_of_is_there_when_a_task_is():
    """Nothing else need be imported before a checkpoint is read."""
    in_processes(_has_what_models_are_made_of, n=1)


def test_nothing_else_is():
    for name in [
        *("os.system", "torch.optim.AdamW.step", "torch.nn.Module", "torch.nn.Sequential", "Tensor", ""),
        *("lit_effattn.tasks.pixels.torch", "lightning.pytorch.callbacks.LambdaCallback", "LinearAttention"),
        *("lit_effattn.attention.linear.Tensor", "lit_effattn.nowhere.LinearAttention"),
    ]:
        assert registry.entered(name) is None


def test_a_class_of_another_package_does_not_enter_itself():
    class Mine(lit_effattn.attention.LinearAttention):
        pass

    assert registry.entered(f"{__name__}.{Mine.__qualname__}") is None


def test_a_derived_class_of_the_same_name_takes_no_place():
    """`torch.export` makes such classes."""
    linear = lit_effattn.attention.LinearAttention
    type("LinearAttention", (linear,), {"__module__": linear.__module__, "__qualname__": "LinearAttention"})
    assert registry.entered("lit_effattn.attention.linear.LinearAttention") is linear


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.lr_scheduler.MultiStepLR, torch.nn.Embedding])
def test_classes_of_torch_are_entered_by_their_full_names(kind: type):
    assert registry.entered(f"{kind.__module__}.{kind.__qualname__}") is kind
