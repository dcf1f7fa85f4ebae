"""Build hook: the long description, which is README.md with absolute links, and the project's addresses.

The environment variable REPOSITORY_URL gives the address of the repository, such as https://github.com/OWNER/lit-effattn;
the release workflow sets it. The sdist records it, so a wheel that is built from the sdist has the same metadata.
Without an address there are no project URLs, and relative links become plain text.
"""

import os
import re
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\[\]]*\]\([^()]*\))*)\]\((?![a-z]+:)([^()\s]+)\)")


class Metadata(MetadataHookInterface):
    """Sets the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields to the project's metadata."""
        root = Path(self.root)
        address = os.environ.get("REPOSITORY_URL", "").rstrip("/") or _recorded(root / "PKG-INFO")
        text = (root / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, address, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {} if address is None else _urls(address, f"v{metadata['version']}")


def absolute_links(text: str, address: str | None, tag: str) -> str:
    """Return Markdown whose relative links and pictures point into the repository at `tag`.

    Args:
        text: The Markdown.
        address: Address of the repository. None: links become their text, pictures are removed.
        tag: Name of the commit.
    """

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if target.startswith("#"):
            return match[0]
        label = _LINK.sub(replace, label)
        if address is None:
            return "" if picture else label
        return f"{picture}[{label}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return _LINK.sub(replace, text)


def _urls(address: str, tag: str) -> dict[str, str]:
    return {
        "Source": address,
        "Documentation": f"{address}/blob/{tag}/docs/index.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def _recorded(path: Path) -> str | None:
    """Return the address that the metadata of an sdist gives, if `path` is such a file."""
    if not path.exists():
        return None
    urls = HeaderParser().parsestr(path.read_text(encoding="utf-8")).get_all("Project-URL", [])
    return dict(url.split(", ", 1) for url in urls).get("Source")
