"""A family of pretrained models: its configuration, and the names of its tensors."""

import math
import re
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
    """The keys of a config.json. Each must be read, checked, or known to be harmless, in `HARMLESS` or `harmless`."""

    def __init__(self, content: Mapping[str, Any], harmless: frozenset[str] = frozenset()) -> None:
        self._content = content
        self._unread = content.keys() - HARMLESS - harmless

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key.

        Raises:
            ValueError: If the key is missing and there is no default.
        """
        self._unread -= {name}
        value = self._content.get(name, default)
        if value is _REQUIRED:
            raise ValueError(f"config.json has no {name}: it is incomplete, or describes another kind of model")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, whole: bool = True, null: bool = False) -> Any:
        """Return the value of a key, a positive number, if `whole` an integer; or None, with `null` or by default.

        Raises:
            ValueError: If the value is something else, or the key is missing without a default.
        """
        value = self.get(name, default)
        if value is None and (null or default is None):
            return None
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"config.json has {name}={value!r}: it must be a positive {'integer' if whole else 'number'}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of a key, true or false.

        Raises:
            ValueError: If the value is something else.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json has {name}={value!r}: it must be true or false")
        return value

    def expect(self, name: str, *values: Any) -> Any:
        """Return the value of a key, the first of `values` if it is missing.

        Raises:
            ValueError: If it is none of `values`, since other values need a computation that is not implemented.
        """
        value = self.get(name, values[0])
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise unsupported(name, value, f"only {' or '.join(map(repr, values))} is supported")
        return value

    def finish(self) -> None:
        """Check that every key has been read.

        Raises:
            ValueError: If one has not, with its name and value.
        """
        self.expect("is_encoder_decoder", False)
        for name in sorted(self._unread):
            if self._content[name] is not None:
                raise unsupported(name, self._content[name], "this key is not known here")


def unsupported(name: str, value: Any, reason: str) -> ValueError:
    """Return the error for a setting that is not supported."""
    return ValueError(
        f"config.json has {name}={value!r}: {reason}, and the converted model could give other logits; convert a model "
        "without it"
    )


class Entry(NamedTuple):
    """A tensor of the pretrained model, and the tensors of a `LanguageModel` that it holds."""

    name: str  # its name in the pretrained model
    parts: tuple[str, ...]  # the names in the `LanguageModel`, whose first dimensions are concatenated
    transposed: bool  # whether the pretrained tensor is the transpose


class Family(ABC):
    """A family of decoders whose tensors have the same names."""

    model_types: ClassVar[tuple[str, ...]]  # values of `model_type` in config.json
    prefix: ClassVar[str]  # of all tensors but the head's. Folders of a model without its head leave it out
    buffers: ClassVar[str]  # pattern of the names of tensors that hold no parameters
    transposed: ClassVar[str] = ""  # pattern of the names of tensors that are transposes of those of torch.nn.Linear
    modules: ClassVar[Mapping[str, str]]
    """Names of modules with a weight and, where the model has one, a bias; those of a `LanguageModel` as values.

    `{i}` is the number of a layer. Several modules, separated by spaces, are concatenated. The embedding is first.
    """

    @abstractmethod
    def build(self, content: Mapping[str, Any], tokenizer: str | None) -> LanguageModel:
        """Build the model that the content of a config.json describes, untrained, with a tokenizer in JSON.

        Raises:
            ValueError: If a setting is not supported.
        """

    @abstractmethod
    def config(self, model: LanguageModel) -> dict[str, Any]:
        """Return the config.json of the model of this family that is nearest to `model`.

        Raises:
            ValueError: If a setting has no counterpart.
        """

    @abstractmethod
    def fits(self, model: LanguageModel) -> bool:
        """Return whether this family is the nearest to a model."""

    def entries(self, model: LanguageModel) -> Iterator[Entry]:
        """Yield all tensors of a model. A head that is tied to the embedding has none."""
        known = model.state_dict().keys()
        for i in range(len(model.backbone.blocks)):  # type: ignore[arg-type]
            for name, modules in self.modules.items():
                if i and "{i}" not in name:
                    continue
                for kind in ("weight", "bias"):
                    parts = tuple(f"{module}.{kind}".format(i=i) for module in modules.split())
                    if parts[0] in known:
                        full = f"{name}.{kind}".format(i=i)
                        yield Entry(full, parts, re.fullmatch(self.transposed, full) is not None)
        if getattr(getattr(model.head, "proj", None), "weight", None) is not model.embedding.weight:
            yield Entry("lm_head.weight", ("head.proj.weight",), False)
