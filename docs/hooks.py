"""What `make docs` adds to the pages: the generated reference, the decisions, the examples."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from oncely.config.reference import markdown

_HERE = Path(__file__).parent
sys.path.append(str(_HERE.parent))

from docs import api_reference  # noqa: E402 - it is beside this file

_OUTSIDE = re.compile(r"\]\(\.\./(examples/[\w./-]+)\)")
_BOOSTS = {"Operate it": 2.0, "Decisions": 0.001}
"""Weights of sections in the search, where a word in a title counts 1,000 times one in a text: what
an operator needs comes before the decisions, also before their titles."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the navigation."""
    decisions = sorted(f"decisions/{one.name}" for one in (_HERE / "decisions").glob("*.md"))
    for section in config.nav or ():
        for pages in section.values():
            for page in pages if isinstance(pages, list) else ():
                if "Decisions" in page:
                    page["Decisions"] = decisions
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the examples, which are beside the folder of the pages."""
    for file in sorted((_HERE.parent / "examples").glob("*.*")):
        files.append(
            File.generated(config, f"examples/{file.name}", abs_src_path=str(file.resolve()))
        )
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links to the examples into the site, append generated references, and weigh the page."""
    section = page.parent.title if page.parent else ""
    if section in _BOOSTS:
        page.meta["search"] = {"boost": _BOOSTS[section]}
    if page.file.src_uri == "pipeline-file.md":
        text += markdown()
    if page.file.src_uri == "api.md":
        text += api_reference.markdown()
    return _OUTSIDE.sub(r"](\1)", text)
