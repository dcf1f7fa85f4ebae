"""Progress bars of the preparation of data."""

from rich.console import Console
from rich.progress import Progress


def progress_bar(*, disable: bool = False) -> Progress:
    """Return a bar on stderr that is removed when it ends. Without a terminal, nothing is printed."""
    console = Console(stderr=True)
    return Progress(transient=True, console=console, disable=disable or not console.is_terminal)
