"""The classes that a checkpoint may name. They enter themselves where they are defined; this module imports none.

Every class of this package that is derived from `hparams.HasInitArgs` enters itself. `enter` adds others.
"""

_CLASSES: dict[str, type] = {}


def enter(*kinds: type) -> None:
    """Add classes under their full names. A class that was entered before keeps its name."""
    for kind in kinds:
        _CLASSES.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)


def entered(name: str) -> type | None:
    """Return the class of this full name, None if no class of this name has been entered. Imports nothing."""
    return _CLASSES.get(name)


def classes() -> list[type]:
    """Return all entered classes."""
    return list(_CLASSES.values())
