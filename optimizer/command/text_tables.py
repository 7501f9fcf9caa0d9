"""Align rows in columns, as far as the width allows."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

# The minimum width of a wrapped last column. In less space, each row of the table becomes a paragraph.
NARROWEST = 24
INDENT = 4
STYLES = {
    "applied": "green",
    "ok": "green",
    "rolled-back": "yellow",
    "vacuous": "yellow",
    "within budget": "yellow",
    "failed": "red",
    "missing": "red",
}

Row = Sequence[str]


def table(columns: Row, rows: Sequence[Row], width: int, *, wraps: bool = False) -> Iterable[Text]:
    """Align the rows in columns if they fit; otherwise write one paragraph per row.

    Only the last cell may be broken, at its spaces.

    Args:
        wraps: whether the last column contains sentences, which may be wrapped.
    """
    widths = [max(cell_len(row[column]) for row in (columns, *rows)) for column in range(len(columns))]
    start = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = min(widths[-1], max(width - start, NARROWEST)) if wraps else widths[-1]
    if start + room > width:
        yield from _paragraphs(columns, rows, width)
        return
    for row in (columns, *rows):
        cells = [padded(cell, size) for cell, size in zip(row[:-1], widths, strict=False)]
        first, *more = (folded(row[-1], room) if wraps else [row[-1]]) or [""]
        line = Text("  ").join([Text(cell, style=STYLES.get(cell.rstrip(), "")) for cell in cells])
        line = Text("  ").join([line, Text(first, style=STYLES.get(first, ""))])
        if row is columns:
            line.stylize("bold")
        yield line
        yield from (Text(" " * start + text) for text in more)


def _paragraphs(columns: Row, rows: Sequence[Row], width: int) -> Iterable[Text]:
    for first, *cells in rows:
        pieces = [f"{name} {cell}" for name, cell in zip(columns[1:], cells, strict=True) if cell]
        line = first
        for number, piece in enumerate(pieces):
            joined = f"{line}{',' if number else ':'} {piece}"
            # Leave room for a comma.
            if cell_len(joined) < width:
                line = joined
                continue
            yield Text(line + ("," if number else ":"))
            *full, last = [" " * INDENT + text for text in folded(piece, max(width - INDENT, 1))]
            yield from map(Text, full)
            line = last
        yield Text(line)


def folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))
