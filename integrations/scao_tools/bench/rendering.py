"""Pieces of a report as Markdown and as HTML, and the files that they make."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scao_tools.bench.figures import Picture
from scao_tools.checkpointing import write_atomically, write_text_atomically
from scao_tools.reporting import markdown_table

_FIGURES = "figures"
_CSS = """
:root { color-scheme: light dark; --line: #ccc; --soft: #f4f4f4; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: #fff; }
figure { margin: 1.5rem 0; } figcaption { font-size: 0.875rem; }
pre { background: var(--soft); padding: 0.6rem; overflow-x: auto; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #222; } body { background: #111; color: #ddd; } }
"""


@dataclass(frozen=True)
class Block:
    """A piece of the report. ``kind``: h1 to h3, p, ul, pre, table (its first row is the header) or img."""

    kind: str
    lines: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    file: str = ""
    picture: Picture | None = None

    def markdown(self) -> str:
        """As Markdown; a picture is a link into the folder of figures."""
        plain = [_escape(line) for line in self.lines]
        if self.kind == "table":
            head, *rows = [[_escape(cell) for cell in row] for row in self.rows]
            return markdown_table(head, rows)
        if self.picture:
            return f"![{plain[0]}]({_FIGURES}/{self.file})"
        if self.kind == "pre":
            return "\n".join(f"    {line}" for line in self.lines[0].splitlines() or [""])
        mark = {"ul": "- ", "p": ""}.get(self.kind) if self.kind[0] != "h" else "#" * int(self.kind[1]) + " "
        return "\n".join(f"{mark}{line}" for line in plain)

    def html(self) -> str:
        """As HTML; a picture is embedded."""
        safe = [html.escape(line) for line in self.lines]
        if self.kind == "table":
            head, *rows = [[html.escape(cell) for cell in row] for row in self.rows]
            lines = [_row("th", head), *(_row("td", row) for row in rows)]
            return f'<div class="wide"><table>\n{chr(10).join(lines)}\n</table></div>'
        if self.picture:
            data = base64.b64encode(self.picture.png).decode("ascii")
            source = f"data:image/png;base64,{data}"
            return f'<figure><img alt="{safe[0]}" src="{source}"><figcaption>{safe[0]}</figcaption></figure>'
        if self.kind == "ul":
            return "<ul>" + "".join(f"<li>{line}</li>" for line in safe) + "</ul>"
        return f"<{self.kind}>{' '.join(safe)}</{self.kind}>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _escape(text: str) -> str:
    """Names come from files: none may break a table or become markup."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", " ".join(text.split()))


def write_blocks(blocks: Sequence[Block], out: Path) -> list[Path]:
    """Write report.md, report.html and figures/*.png; the first block is the title.

    Returns:
        The files written, report.md first.
    """
    (out / _FIGURES).mkdir(parents=True, exist_ok=True)
    written = [out / "report.md", out / "report.html"]
    for block in blocks:
        if block.picture:
            written.append(out / _FIGURES / block.file)
            write_atomically(written[-1], _writer(block.picture.png))
    write_text_atomically(written[0], "\n\n".join(block.markdown() for block in blocks) + "\n")
    body = "\n".join(block.html() for block in blocks)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{blocks[0].lines[0]}</title><style>{_CSS}</style></head>'
    )
    write_text_atomically(written[1], f"{page}\n<body>\n{body}\n</body></html>\n")
    return written


def _writer(png: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(png)

    return write
