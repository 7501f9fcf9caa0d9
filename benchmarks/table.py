"""A table in three forms: on the terminal, as Markdown, and its data as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console


@dataclass
class Table:
    """Rows of text under headings.

    Attributes:
        left: the number of columns, from the left, that hold names; the others hold numbers.
        caption: sentences below the table.
    """

    title: str
    headings: Sequence[str]
    left: int = 1
    rows: list[Sequence[str]] = field(default_factory=list)
    caption: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        if len(cells) != len(self.headings):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(self.headings)} columns")
        self.rows.append(cells)

    def show(self) -> None:
        """Print the table. If it is wider than the terminal, the text wraps within its cells."""
        table = rich.table.Table(title=self.title, title_justify="left", caption_justify="left")
        table.caption = "\n".join(self.caption) or None
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if number < self.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(rich.markup.escape(cell) for cell in row))
        console = Console()
        # A file or a pipe gets a large width, because nobody can widen it later.
        Console(width=None if console.is_terminal else 200).print(table)

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rules = ["---" if number < self.left else "---:" for number in range(len(self.headings))]
        lines = [self.headings, rules, *self.rows]
        body = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
        below = "".join(f"\n{sentence}\n" for sentence in self.caption)
        return f"### {self.title}\n\n{body}\n{below}"


def _in_markdown(cell: str) -> str:
    """Escape a cell, so that its text makes no column and, outside of code, no link; torch prints `%5[axis=0](%3)`."""
    # Code is enclosed in two runs of equally many backticks. A run without a counterpart is text.
    parts = re.split(r"((?<!`)(`+)(?!`).*?(?<!`)\2(?!`))", cell.replace("|", "∣"))
    text, code = parts[::3], [*parts[1::3], ""]
    return "".join(one.replace("](", "]\\(") + other for one, other in zip(text, code, strict=True))


def write(tables: Sequence[Table], data: dict[str, Any], json_path: Path | None, markdown_path: Path | None) -> None:
    """Write the tables as Markdown and the data as JSON, each if it has a path."""
    if markdown_path is not None:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def publish(tables: Sequence[Table], data: dict[str, Any], json_path: Path | None, markdown_path: Path | None) -> None:
    """Print the tables, and write them and the data if they have a path."""
    for table in tables:
        table.show()
    write(tables, data, json_path, markdown_path)


def seconds(value: float) -> str:
    """Format seconds, in a unit that leaves three digits: `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.3g} µs"


def mebibytes(value: int) -> str:
    """Format bytes in MiB: `256.0 MiB`."""
    return f"{value / 2**20:.1f} MiB"
