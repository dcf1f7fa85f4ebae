"""MkDocs hooks: pages made from Markdown files at the top of the repository, and from notebooks.

In the repository, pages link to these files as `../SECURITY.md`; on the site, the same links lead to their pages.
A notebook is shown as it is stored, with its outputs; nothing is executed.
"""

import json
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
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        files.append(File.generated(config, f"{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def notebook_page(notebook: Path) -> str:
    """Return a notebook's cells, and the texts and PNGs that they put out, as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![Output](data:image/png;base64,{''.join(output['data']['image/png']).strip()})")
    title, *rest = parts
    return "\n\n".join([title, f"This page is a notebook: [{notebook.name}]({notebook.name}).", *rest])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links between the repository's files and the pages at the pages."""
    source = page.file.src_uri
    here = "" if source in PAGES.values() else posixpath.join("docs", posixpath.dirname(source))

    def on_the_site(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(here, path))
        if target in PAGES:
            target = PAGES[target]
        elif target.endswith(".ipynb") and source != f"{posixpath.basename(target)[:-6]}.md":
            target = f"{target.removeprefix('docs/')[:-6]}.md"
        elif here == "" and target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"

    return re.sub(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)", on_the_site, markdown)
