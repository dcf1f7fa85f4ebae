"""Options that are numbers are refused where they are NaN, which is neither too small nor too large, or infinite."""

import inspect
import math
from functools import partial
from typing import get_origin

import pytest

from lit_effattn import Transformer, attention
from lit_effattn.attention import Attention, FeatureMap
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.hparams import parameters
from lit_effattn.interchange.family import Settings
from lit_effattn.nn.adaptive import AdaptiveEmbedding
from lit_effattn.nn.heads import CategoricalHead


def is_class(value: object) -> bool:
    """Until Python 3.10, Callable[…] counts as a class."""
    return inspect.isclass(value) and get_origin(value) is None


EXPORTED = [getattr(attention, name) for name in attention.__all__ if is_class(getattr(attention, name))]
MAKE = {
    **{kind: (8, 2) for kind in EXPORTED if issubclass(kind, Attention) and not inspect.isabstract(kind)},
    **{kind: (4,) for kind in EXPORTED if issubclass(kind, FeatureMap) and not inspect.isabstract(kind)},
    Transformer: (8, 2, 1),
    CategoricalHead: (8, 5),
    partial(AdaptiveEmbedding, cutoffs=[4]): (9, 8),
    RotaryPositions: (4,),
}
CASES = [
    (kind, name, "tuple" in str(parameter.annotation))
    for kind in MAKE
    for name, parameter in parameters(getattr(kind, "func", kind)).items()
    if "float" in str(parameter.annotation)
]


def test_numbers_of_modules_are_finite():
    """Every number, so that a new option is tested too."""
    assert len(CASES) > 30
    for kind, name, several in CASES:
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match=rf"{name}=\(?(0.1, )?{value}"):
                kind(*MAKE[kind], **{name: (0.1, value) if several else value})


def test_numbers_of_a_converted_model_are_finite():
    """JSON as Python reads it has NaN."""
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"config.json has epsilon={value}"):
            Settings({"epsilon": value}, frozenset()).number("epsilon", whole=False)
