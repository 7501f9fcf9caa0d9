"""A hook of mkdocs: the README is the home page, and the site has every file outside docs/ that a page links to.

The pages are written for a reader of the repository, with links relative to it. The README becomes `index.md`, and
`docs/x.md` becomes `x.md`; any other Markdown file keeps its path, and a file of code becomes a page that shows it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and the files that the pages lead to."""
    found = [ROOT / "README.md", *(Path(file.abs_src_path) for file in files.documentation_pages())]
    for path in found:
        if path.suffix == ".md":
            found += [target for target in _linked(path) if target not in found]
        if files.get_file_from_path(_on_site(path)) is None:
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to the pages of the site."""
    del config, files
    source, here = _in_repository(page.file.src_uri), os.path.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        return os.path.relpath(_on_site(target), here or ".") if target.is_file() else link[1]

    return LINK.sub(on_site, markdown)


def _linked(page: Path) -> Iterator[Path]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target


def _file(path: Path, config: MkDocsConfig) -> File:
    if path.suffix == ".md":
        return File.generated(config, _on_site(path), abs_src_path=str(path))
    name = path.relative_to(ROOT).as_posix()
    language = {".py": "python", ".yml": "yaml"}.get(path.suffix, path.suffix.removeprefix("."))
    text = f"# {name}\n\n````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"
    return File.generated(config, _on_site(path), content=text)


def _on_site(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if name.endswith(".md") else f"{name}.md"


def _in_repository(uri: str) -> Path:
    if uri == "index.md":
        return ROOT / "README.md"
    own = ROOT / "docs" / uri
    return own if own.exists() else ROOT / uri
