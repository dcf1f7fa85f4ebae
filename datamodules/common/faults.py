"""Items that are left out of a data set: counted by reason, and the first few named."""

from collections.abc import Iterable
from typing import Any, NamedTuple

_NAMED = 3  # items of each reason that a message names


class Fault(NamedTuple):
    """The reason why an item is left out."""

    reason: str  # the kind of fault in a word or two, the same for all items with this fault
    message: str  # names the item or its file, the fault and the remedy


class Faults:
    """Faults, counted by reason, with the first messages of each reason. The size does not grow with their number.

    Examples:
        >>> print(Faults([Fault("empty", "a.tsv:2: has no target"), Fault("empty", "a.tsv:9: has no source")]))
        2 empty:
            a.tsv:2: has no target
            a.tsv:9: has no source
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._counts: dict[str, int] = {}
        self._messages: dict[str, list[str]] = {}
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Count a fault."""
        messages = self._messages.setdefault(fault.reason, [])
        self._counts[fault.reason] = self._counts.get(fault.reason, 0) + 1
        if len(messages) < _NAMED:
            messages.append(fault.message)

    @property
    def first(self) -> str:
        """The first message of the most frequent reason that is not a header row. There must be a fault."""
        counts = {reason: n for reason, n in self._counts.items() if reason != "header row"} or self._counts
        return self._messages[max(counts, key=counts.__getitem__)][0]

    @property
    def counts(self) -> str:
        """The number of faults of each reason, in one line: `; left out: 3 hidden`. Empty without faults."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self._counts.items())
        return f"; left out: {counts}" if counts else ""

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __str__(self) -> str:
        lines = []
        for reason, count in self._counts.items():
            messages = self._messages[reason]
            more = [f"and {count - len(messages)} more"] if count > len(messages) else []
            lines.append(f"{count} {reason}:\n    " + "\n    ".join(messages + more))
        return "\n  ".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Return the faults as plain data, the input of `from_data`."""
        return {"counts": self._counts, "messages": self._messages}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Faults":
        """Create faults from the output of `to_data`."""
        faults = cls()
        faults._counts = dict(data["counts"])
        faults._messages = {reason: list(messages) for reason, messages in data["messages"].items()}
        return faults
