import json
from functools import partial

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, ReluFeatureMap, SoftmaxAttention
from lit_effattn.attention.positions import GridPositions, LearnedPositions, RotaryPositions, SinusoidalPositions
from lit_effattn.hparams import HasInitArgs, defaults, init_args, parameters, spec
from lit_effattn.nn.transformer import Block, FeedForward
from lit_effattn.sequence import SequenceModule


def rebuilt(said: dict, kind: type = SequenceModule):
    """Build a module from what its spec says, as a checkpoint or the command line does."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, "module")
    plain = json.loads(json.dumps(said))  # nothing but plain data survives this
    return parser.instantiate_classes(parser.parse_object({"module": plain})).module


MODULES = {
    "defaults": lambda: Transformer(8, 2, 3),
    "positional": lambda: SoftmaxAttention(8, 2, True, window=3),
    "options": lambda: Transformer(
        8,
        n_heads=2,
        n_layers=2,
        d_ff=11,
        norm="post",
        final_norm=True,
        activation="swiglu",
        init="xavier",
        dropout=0.25,
    ),
    "class": lambda: Transformer(8, 2, 2, attention=LinearAttention, positions=RotaryPositions),
    "partial": lambda: Transformer(
        8,
        2,
        2,
        attention=partial(SoftmaxAttention, window=5, bias=False),
        positions=partial(LearnedPositions, max_len=7),
    ),
    "list": lambda: Transformer(8, 2, 2, attention=[LinearAttention, partial(SoftmaxAttention, window=5)]),
    "nested partial": lambda: Transformer(
        8, 2, 1, attention=partial(LinearAttention, chunk_size=3, feature_map=partial(ReluFeatureMap, floor=0.25))
    ),
    "tuple": lambda: Transformer(8, 2, 1, positions=partial(GridPositions, shape=(2, 3, 1)), position_width=3),
    "no positions": lambda: Transformer(8, 2, 1, positions=None, causal=False),
}


def same(a, b) -> None:
    """Assert that two modules are built alike and, with the same parameters, compute the same."""
    assert repr(a) == repr(b)
    assert {n: p.shape for n, p in a.named_parameters()} == {n: p.shape for n, p in b.named_parameters()}
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 6, a.d_input)
    assert torch.equal(a.eval()(x)[0], b.eval()(x)[0])


@pytest.mark.parametrize("name", MODULES)
def test_what_was_built_is_built_again(name: str):
    """Twice: from jsonargparse come other callables than a person writes, and every default."""
    module = MODULES[name]()
    again = rebuilt(spec(module))
    same(module, again)
    same(module, rebuilt(spec(again)))


def test_spec_is_plain_and_says_what_was_given():
    message = spec(Transformer(8, 2, n_layers=1, attention=[partial(SoftmaxAttention, window=5), LinearAttention][:1]))
    assert message == {
        "class_path": "lit_effattn.nn.transformer.Transformer",
        "init_args": {
            "d_model": 8,
            "n_heads": 2,
            "n_layers": 1,
            "attention": [{"class_path": "lit_effattn.attention.softmax.SoftmaxAttention", "init_args": {"window": 5}}],
        },
    }


def test_recorded_objects_inside_are_told_too():
    class Outer(HasInitArgs):
        def __init__(self, inner, table=None):
            pass

    inner = LinearAttention(8, 2, chunk_size=5)
    message = init_args(Outer(inner, table={"a": (1, 2.5, None)}))
    assert message == {
        "inner": {
            "class_path": "lit_effattn.attention.linear.LinearAttention",
            "init_args": {"d_model": 8, "n_heads": 2, "chunk_size": 5},
        },
        "table": {"a": [1, 2.5, None]},
    }


def test_a_lambda_is_refused_with_its_place():
    for attention in (
        lambda d, h, c: LinearAttention(d, h, c),
        partial(lambda d, h, c, window: SoftmaxAttention(d, h, c, window=window), window=3),
        partial(LinearAttention, feature_map=lambda d: ReluFeatureMap(d)),
        partial(lambda kind, d, h, c: kind(d, h, c), LinearAttention),
    ):
        model = Transformer(8, 2, 1, attention=attention)  # builds and trains; but a checkpoint can't hold it
        with pytest.raises(TypeError, match=r"Transformer\(attention=…\).*functools\.partial"):
            spec(model)
    with pytest.raises(TypeError, match=r"Block\(feed_forward=…\)"):
        spec(Block(LinearAttention(8, 2), FeedForward(8, 16)))


def test_a_partial_without_options_is_recorded_as_its_class():
    """Resuming builds a partial of a class that was given by its name, and saves the same arguments."""
    assert spec(Transformer(8, 2, 1, positions=partial(SinusoidalPositions))) == spec(
        Transformer(8, 2, 1, positions=SinusoidalPositions)
    )


def test_a_subclass_records_its_own_call():
    class Wide(SoftmaxAttention):
        def __init__(self, factor: int = 2):
            super().__init__(8 * factor, 2)

    assert init_args(Wide(3)) == {"factor": 3}
    assert init_args(Wide()) == {}


def test_parameters_are_those_of_the_constructor():
    class Parent(HasInitArgs):
        def __init__(self, a: int, *, b: int = 2) -> None: ...

    class Child(Parent):
        """Has no constructor of its own."""

    for kind in (Parent, Child):
        assert list(parameters(kind)) == ["a", "b"]
        assert defaults(kind) == {"b": 2}


def test_options_that_are_passed_on_are_those_of_the_base_class():
    class Parent(HasInitArgs):
        """Has options.

        Args:
            a: The first.
            b: The second.
            c: The third.
        """

        def __init__(self, a: int, *, b: int = 2, c: float = 1.0) -> None: ...

    class Child(Parent):
        """Sets one of them.

        Args:
            d: The fourth.
        """

        def __init__(self, a: int, *, d: bool = False, **options: object) -> None:
            super().__init__(a, b=3, **options)

    assert defaults(Child) == {"d": False, "c": 1.0}
    assert {name: option.doc for name, option in parameters(Child).items()} == {
        "a": "The first.",
        "d": "The fourth.",
        "c": "The third.",
    }
    assert init_args(Child(1, c=2.0)) == {"a": 1, "c": 2.0}
