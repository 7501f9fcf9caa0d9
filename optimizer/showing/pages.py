"""Plain data for people: numbers as short texts, and templates as HTML.

Everything in a page that comes from data is escaped, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from optimize_export.errors import printable_lines

_CODE = re.compile("`([^`]+)`")
_FOLDER = Path(__file__).parent / "templates"
# The operations of a profile that a table names one by one; the data has all.
_OPERATIONS = 10


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
        bytes=size_text,
        seconds=seconds_text,
        number=number_text,
        percent=percent_text,
        count=count_text,
        counts=counts_text,
        profile_rows=profile_rows,
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


def size_text(count: int) -> str:
    """A number of bytes in the unit that fits: "97 MiB"."""
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time in the unit that fits: "110 ms"."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def number_text(value: float | str | None, digits: int = 2) -> str:
    """A number with at most `digits` digits, "-" for None. JSON has infinity and NaN as texts, which stay as they are."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def percent_text(share: float) -> str:
    """A share in percent: "23 %", and "under 1 %" for less than one."""
    return "0 %" if share == 0 else "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def count_text(count: int, noun: str) -> str:
    """A number with its noun: "1 file", "2 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counts_text(counts: Mapping[str, int]) -> str:
    """Names with their counts: "conv2d, relu ×2"."""
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.items())


def profile_rows(profile: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of a profile's table: the most expensive operations, all others in one row, and the time between them.

    Args:
        profile: in its JSON form.

    Returns:
        `share`, `seconds`, `calls` ("" for the last row), `name` and `where` of each row; they add up to the whole run.
    """
    seconds, operations = profile["seconds"], profile["operations"]
    rows = list(operations[:_OPERATIONS])
    if others := operations[_OPERATIONS:]:
        sums = {key: sum(each[key] for each in others) for key in ("share", "seconds", "calls")}
        rows.append({**sums, "name": "others", "where": ""})
    rest = max(0.0, seconds - sum(each["seconds"] for each in operations))
    if seconds and rest / seconds >= 0.001:
        rows.append({"share": rest / seconds, "seconds": rest, "calls": "", "name": "between operations", "where": ""})
    return rows
