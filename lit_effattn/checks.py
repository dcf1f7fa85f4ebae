"""Range checks of arguments. Every package may import them."""

import math
from collections.abc import Collection, Mapping
from typing import Any, get_args


def at_least(least: float, **values: float | None) -> None:
    """Check arguments, given by name, against a minimum. None is not checked.

    Raises:
        ValueError: If a value is below `least`.
    """
    for name, value in values.items():
        if value is not None and not value >= least:  # NaN fails, too
            raise ValueError(f"{name}={value} must be at least {least}")


def positive(**values: float | None) -> None:
    """Check that arguments, given by name, are above 0 and finite. None is not checked.

    Raises:
        ValueError: If a value is not.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be above 0, and finite")


def one_of(known: Any, **values: Any) -> None:
    """Check arguments, given by name, against the `known` values, a collection or a `Literal`.

    Raises:
        ValueError: If a value is not known.
    """
    known = get_args(known) or known
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")


def probabilities(**values: float | None) -> None:
    """Check arguments, given by name, that are probabilities below 1, such as a dropout.

    Raises:
        ValueError: If a value is not from 0 to below 1.
    """
    for name, value in values.items():
        if value is None or not 0 <= value < 1:
            raise ValueError(f"{name}={value} is not a probability from 0 to below 1")


def applicable(argument: str, value: str, takes: Mapping[str, Collection[str]], **options: Any) -> None:
    """Check an argument that chooses among variants, and the options, given by name, that not every variant takes.

    Args:
        argument: Name of the argument, such as `source`.
        value: The chosen variant.
        takes: The variants, and the names of the options of each.
        options: The options. None is not checked.

    Raises:
        ValueError: If the variant is not known, or does not take an option.
    """
    if value not in takes:
        raise ValueError(f"{argument}={value!r} is not known; choose one of {', '.join(takes)}")
    for name, option in options.items():
        if option is not None and name not in takes[value]:
            suitable = " or ".join(variant for variant, names in takes.items() if name in names)
            raise ValueError(
                f"{name}={option!r} does not apply to {argument}={value!r}; leave it out, or choose {argument} "
                f"{suitable}"
            )
