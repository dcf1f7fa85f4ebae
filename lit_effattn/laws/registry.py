"""All laws, in the order in which they are checked."""

from collections.abc import Iterable

from lit_effattn.laws.controls import Alive, NoFuture
from lit_effattn.laws.law import Law
from lit_effattn.laws.numbers import Gradients, Precision
from lit_effattn.laws.padding import EmptyRows, FullLengths, Padding
from lit_effattn.laws.round_trips import Compiled, CompiledSteps, Generation, Parameters, SavedState
from lit_effattn.laws.rows import Alone, Packed, Ragged, Reset, Select
from lit_effattn.laws.segments import (
    Bounded,
    CarriedGradients,
    Combine,
    DonationEnds,
    Segments,
    Steps,
    Unchanged,
)

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Alive(),
        NoFuture(),
        Segments(),
        Steps(),
        CarriedGradients(),
        Unchanged(),
        DonationEnds(),
        Bounded(),
        Combine(),
        Alone(),
        Ragged(),
        Reset(),
        Select(),
        Packed(),
        Padding(),
        FullLengths(),
        EmptyRows(),
        Gradients(),
        Precision(),
        Parameters(),
        SavedState(),
        Compiled(),
        CompiledSteps(),
        Generation(),
    )
}
"""The laws by their names."""

BITWISE = ("no-future", "segments", "steps", "alone", "ragged", "select", "reset", "packed", "full-lengths", "padding")
"""The laws that `check(bitwise=True)` checks, to the bit."""


def chosen(names: Iterable[str] | None) -> list[Law]:
    """Return the laws of these names; None: all.

    Raises:
        ValueError: If there is no law of a name, or no name.
    """
    if names is None:
        return list(LAWS.values())
    if isinstance(names, str) or not (names := list(names)):
        raise ValueError(f"laws={names!r} must be a list of at least one name, such as ['segments']")
    for name in names:
        if name not in LAWS:
            raise ValueError(f"laws={name!r} is not a law; there are {', '.join(LAWS)}")
    return [LAWS[name] for name in names]
