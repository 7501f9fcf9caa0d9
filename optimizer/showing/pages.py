"""Render templates as HTML. Everything that comes from data is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from optimize_export.errors import printable_lines
from optimizer.showing import texts

_CODE = re.compile("`([^`]+)`")
_FOLDER = Path(__file__).parent / "templates"


@cache
def _environment() -> Any:
    # Importing jinja2 takes as long as many short commands, so it is imported when something is shown.
    import jinja2

    # Not by the name of the package, because a user's own package may have it.
    loader = jinja2.FileSystemLoader(_FOLDER)
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(
        bytes=texts.size_text,
        seconds=texts.seconds_text,
        number=texts.number_text,
        percent=texts.percent_text,
        count=texts.count_text,
        counts=texts.counts_text,
        profile_rows=texts.profile_rows,
        marked=_marked,
    )
    return made


def _marked(text: str) -> Any:
    """The text with `code` between backticks marked as code."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def page(template: str, **facts: Any) -> str:
    """A whole page.

    Args:
        template: the name of a file in `templates`, without its suffixes.
        facts: the variables of the template.
    """
    rendered: str = _environment().get_template(f"{template}.html.jinja").render(facts)
    # Names of classes, inputs and files may contain characters that change the direction of the text around them.
    return printable_lines(rendered)


def fragment(template: str, **facts: Any) -> str:
    """A part of a page with its own style, for `_repr_html_` in notebooks; arguments as for `page`."""
    return page("fragment", part=f"{template}.html.jinja", **facts)
