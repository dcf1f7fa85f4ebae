"""What a family of pretrained models is: its settings, and the names of its tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from lit_effattn.tasks import LanguageModel

_REQUIRED = object()

HARMLESS = frozenset(
    (
        *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "torch_dtype", "id2label", "label2id"),
        *("gradient_checkpointing", "initializer_range", "model_type", "output_attentions", "output_hidden_states"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "problem_type", "return_dict", "task_specific_params"),
        *("tokenizer_class", "transformers_version", "use_cache"),
    )
)
"""Keys of any config.json that do not change the logits of a model in evaluation."""


class Settings:
    """The keys of a config.json. Each must be read, checked, or known to be harmless.

    Args:
        content: What the file holds.
        harmless: Keys that do not change the logits, in addition to `HARMLESS`.
    """

    def __init__(self, content: Mapping[str, Any], harmless: frozenset[str]) -> None:
        self._content = content
        self._left = content.keys() - HARMLESS - harmless

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key.

        Raises:
            ValueError: there is none, and no default.
        """
        self._left -= {name}
        value = self._content.get(name, default)
        if value is _REQUIRED:
            raise ValueError(f"config.json has no {name}: it is not whole, or of another kind of model")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, whole: bool = True, null: bool = False) -> Any:
        """Return the value of a key, a positive number; or None, with `null` or if that is the default.

        Raises:
            ValueError: it is something else.
        """
        value = self.get(name, default)
        if value is None and (null or default is None):
            return None
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"config.json has {name}={value!r}, which is no positive {'integer' if whole else 'number'}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of a key, true or false.

        Raises:
            ValueError: it is something else.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json has {name}={value!r}, which is neither true nor false")
        return value

    def expect(self, name: str, *values: Any) -> Any:
        """Return the value of a key, the first of `values` if it is absent.

        Raises:
            ValueError: it is none of `values`: the model computes what is not implemented here.
        """
        value = self.get(name, values[0])
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise refusal(name, value, f"only {' or '.join(map(repr, values))} is supported")
        return value

    def finish(self) -> None:
        """Refuse the keys that nobody asked for.

        Raises:
            ValueError: names the first, with its value.
        """
        self.expect("is_encoder_decoder", False)
        for name in sorted(self._left):
            if self._content[name] is not None:
                raise refusal(name, self._content[name], "this key is not known here")


def refusal(name: str, value: Any, reason: str) -> ValueError:
    """Return the error of a setting that is not supported."""
    return ValueError(
        f"config.json has {name}={value!r}: {reason}, and the converted model could give other logits; convert a model "
        "without it"
    )


class Entry(NamedTuple):
    """A tensor of theirs and those of ours that it holds, one below the other.

    Attributes:
        theirs: Its name; `{i}` is a layer.
        ours: The names of ours, whose first dimensions are joined.
        transposed: Whether theirs is the transpose.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


class Family(ABC):
    """A family of decoders with the same tensors."""

    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in config.json."""

    prefix: ClassVar[str]
    """How the names of all tensors but the head's begin. Folders of a model without its head leave it out."""

    buffers: ClassVar[str]
    """Pattern of the names of tensors that hold no parameters."""

    @abstractmethod
    def build(self, content: Mapping[str, Any], tokenizer: str | None) -> LanguageModel:
        """Build the model that a config.json describes, untrained.

        Raises:
            ValueError: something in it is not supported.
        """

    @abstractmethod
    def config(self, model: LanguageModel) -> dict[str, Any]:
        """Return the config.json of a model of this family, as far as it is one.

        Raises:
            ValueError: a setting has no counterpart.
        """

    @abstractmethod
    def fits(self, model: LanguageModel) -> bool:
        """Return whether a model is nearest to this family."""

    @abstractmethod
    def layer(self, model: LanguageModel) -> Iterator[Entry]:
        """Yield the tensors of a layer."""

    @abstractmethod
    def outside(self, model: LanguageModel) -> Iterator[Entry]:
        """Yield the tensors outside the layers, without the head's."""

    def entries(self, model: LanguageModel) -> Iterator[Entry]:
        """Yield all tensors of a model; of a tied head none."""
        yield from self.outside(model)
        for i in range(len(model.backbone.blocks)):  # type: ignore[arg-type]
            for theirs, ours, transposed in self.layer(model):
                yield Entry(theirs.format(i=i), tuple(name.format(i=i) for name in ours), transposed)
        if not is_tied(model):
            yield Entry("lm_head.weight", ("head.proj.weight",))


def is_tied(model: LanguageModel) -> bool:
    """Return whether the head has the embedding's matrix."""
    return getattr(getattr(model.head, "proj", None), "weight", None) is model.embedding.weight


def both(theirs: str, ours: str, *, bias: bool = True, transposed: bool = False) -> Iterator[Entry]:
    """Yield the matrix of a module, and its bias."""
    yield Entry(f"{theirs}.weight", (f"{ours}.weight",), transposed)
    if bias:
        yield Entry(f"{theirs}.bias", (f"{ours}.bias",))
