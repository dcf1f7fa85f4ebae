"""Reading YAML from untrusted files as plain data, with bounds on its length, its depth and its aliases."""

from typing import Any

import yaml

MAX_BYTES = 2**20
MAX_NODES = 100_000
MAX_DEPTH = 100
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""That of libyaml, several times as fast, where PyYAML has it."""


class OutOfBoundsError(ValueError):
    """Raised if YAML is too long, too deep, or becomes too large by its aliases."""


class RepeatedKeyError(ValueError):
    """Raised if a mapping has a key twice: YAML would keep the last value without a word."""


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: If the text is not YAML, is out of bounds, or has a key twice: see `check_bounds`.
    """
    try:
        check_bounds(text)
        return yaml.load(text, SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except OverflowError as error:
        raise OutOfBoundsError("a number is too large") from error


def check_bounds(text: str) -> None:
    """Check the size that YAML has when it is parsed, and its keys.

    Raises:
        OutOfBoundsError: If the text is longer than `MAX_BYTES`, is nested more than `MAX_DEPTH` deep, has an alias
            inside itself, or has more than `MAX_NODES` nodes, counted with those that aliases repeat.
        RepeatedKeyError: If a mapping has a key twice.
        yaml.YAMLError: If it is not YAML.
    """
    if len(text) > MAX_BYTES:
        raise OutOfBoundsError(f"it has more than {MAX_BYTES:,} characters")
    loader = SafeLoader(text)
    try:
        node = loader.get_single_node()
    except RecursionError as error:
        raise OutOfBoundsError("it is nested too deeply") from error
    finally:
        loader.dispose()
    if node is not None:
        _check(node, {}, 0)


def _check(node: Any, sizes: dict[int, int | None], depth: int) -> int:
    """Return how many nodes a node has, each counted as often as aliases repeat it."""
    if depth > MAX_DEPTH:
        raise OutOfBoundsError(f"it is nested more than {MAX_DEPTH} deep")
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise OutOfBoundsError("an alias is inside the node that it names")
        return size
    sizes[id(node)] = None
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [child for pair in children for child in pair]
    size = 1
    for child in children:
        size += _check(child, sizes, depth + 1)
        if size > MAX_NODES:
            raise OutOfBoundsError(f"it has more than {MAX_NODES:,} nodes, counted with those that aliases repeat")
    sizes[id(node)] = size
    return size


def _check_keys(mapping: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            raise RepeatedKeyError(f"the key {key.value!r} is there twice, lines {lines[name]} and {line}; join them")
        lines[name] = line
