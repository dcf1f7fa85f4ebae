"""Reading YAML from untrusted files as plain data, with bounds on its length, its depth and its aliases."""

from __future__ import annotations

from typing import Any

import yaml

MAX_BYTES = 2**20
MAX_NODES = 100_000
MAX_DEPTH = 100


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: If the text is not YAML, is longer than `MAX_BYTES`, is nested more than `MAX_DEPTH` deep, has an
            alias inside itself, or has more than `MAX_NODES` nodes, counted with those that aliases repeat.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} characters, more than {MAX_BYTES:,}")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {}, 0)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (RecursionError, OverflowError) as error:
        raise ValueError("it is nested too deeply, or a number is too large") from error
    finally:
        loader.dispose()


def _check(node: Any, sizes: dict[int, int | None], depth: int) -> int:
    """Return how many nodes a node has, each counted as often as aliases repeat it."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise ValueError("an alias is inside the node that it names")
        return size
    sizes[id(node)] = None
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in children for child in pair]
    size = 1
    for child in children:
        size += _check(child, sizes, depth + 1)
        if size > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES:,} nodes, counted with those that aliases repeat")
    sizes[id(node)] = size
    return size
