"""Range checks of constructor arguments."""


def check_at_least(least: int, **values: int | None) -> None:
    """Check that no value is less than `least`. None is accepted: it is the default of an option.

    Raises:
        ValueError: If a value is less. The message names the argument.

    Example:
        >>> check_at_least(1, batch_size=0)
        Traceback (most recent call last):
            ...
        ValueError: batch_size=0 must be at least 1
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
