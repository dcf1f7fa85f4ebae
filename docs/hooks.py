"""MkDocs hooks: pages made from Markdown files at the top of the repository.

In the repository, pages link to these files as `../SECURITY.md`; on the site, the same links lead to their pages.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {name: name.lower() for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")}
"""Files of the repository, and the pages that they become."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links between the repository's files and the pages at the pages."""
    source = page.file.src_uri
    here = "" if source in PAGES.values() else posixpath.join("docs", posixpath.dirname(source))

    def on_the_site(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(here, path))
        if target in PAGES:
            target = PAGES[target]
        elif here == "" and target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"

    return re.sub(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)", on_the_site, markdown)
