"""Range checks of arguments. Every package may import them."""


def at_least(least: float, **values: float | None) -> None:
    """Check arguments, given by name, against a minimum. None is not checked.

    Raises:
        ValueError: If a value is below `least`.
    """
    for name, value in values.items():
        if value is not None and not value >= least:  # NaN fails, too
            raise ValueError(f"{name}={value} must be at least {least}")


def probabilities(**values: float | None) -> None:
    """Check arguments, given by name, that are probabilities below 1, such as a dropout. None is not checked.

    Raises:
        ValueError: If a value is not from 0 to below 1.
    """
    for name, value in values.items():
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name}={value} is not a probability from 0 to below 1")
