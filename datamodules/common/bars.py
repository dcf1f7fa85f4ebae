"""Progress bars of what is made before training."""

from rich.console import Console
from rich.progress import Progress


def progress_bar(*, disable: bool = False) -> Progress:
    """Return a bar on stderr that is removed at its end. Without a terminal there is none, nor its blank line."""
    console = Console(stderr=True)
    return Progress(transient=True, console=console, disable=disable or not console.is_terminal)
