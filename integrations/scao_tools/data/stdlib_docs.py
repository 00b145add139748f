"""Instruction data that every Python has: the standard library's functions and their docstrings.

The sources are parsed, never imported: importing some modules opens windows, browsers, or prints a poem.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from scao_tools.data.rows import Message, Row
from scao_tools.errors import DataError

INSTRUCTION = "Write the docstring of this Python function."

_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "turtledemo"}
)
# Characters, chosen: short code with a longer docstring keeps most tokens of an example in the answer.
_SOURCE_LIMIT = 300
_DOC_LENGTHS = range(120, 701)


def stdlib_directory() -> Path:
    """Where this interpreter keeps the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_rows(root: Path | None = None, *, signature_only: bool = False) -> list[Row]:
    """All usable function-docstring pairs in a fixed order; a docstring or a source seen before is left out.

    With ``signature_only`` the prompt is the function's first line, so that three quarters of the tokens are answer.
    """
    root = stdlib_directory() if root is None else root
    rows: list[Row] = []
    seen: set[str] = set()
    for path in source_files(root):
        group = path.relative_to(root).parts[0].removesuffix(".py")
        for code, doc in _documented_functions(path):
            source = _signature(code) if signature_only else code
            if len(source) > min(_SOURCE_LIMIT, len(doc)) or source in seen or doc in seen:
                continue
            seen.update((source, doc))
            rows.append(
                Row(group, (Message("system", INSTRUCTION), Message("user", source), Message("assistant", doc)))
            )
    if not rows:
        raise DataError(f"{root} holds no Python sources with docstrings; give your own rows with --data FILE.jsonl")
    return rows


def source_files(root: Path) -> list[Path]:
    """All Python files of the standard library that are no tests, in a fixed order."""
    files = [
        path for path in root.rglob("*.py") if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts[:-1])
    ]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _documented_functions(path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources are not the user's concern
            tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return  # a file that this Python cannot read is no training text; a few exist on purpose (bad encodings)
    lines = text.split("\n")  # splitlines() also cuts at form feeds, which the line numbers of ast do not count
    for node in _functions(tree):
        pair = _pair(node, lines)
        if pair is not None:
            yield pair


def _signature(code: str) -> str:
    """The line of the ``def``, without decorators; parameters on further lines are left out."""
    lines = code.split("\n")
    return next((line for line in lines if line.lstrip().startswith(("def ", "async def "))), lines[0])


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions in source order. Only statements are visited: `ast.walk` also visits expressions, 5x the nodes."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        children = [
            child for field in ("body", "handlers", "orelse", "finalbody") for child in getattr(node, field, ())
        ]
        stack.extend(reversed(children))


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    doc = ast.get_docstring(node, clean=False)
    if doc is None:
        return None
    doc = inspect.cleandoc(doc).strip()
    if len(doc) not in _DOC_LENGTHS:
        return None
    first, end = node.lineno, node.end_lineno or node.lineno
    doc_first, doc_end = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
    neighbors = node.body[1:2]
    if doc_first <= first or (neighbors and neighbors[0].lineno <= doc_end):
        return None  # the docstring shares a line with code, so it cannot be cut out by lines
    kept = lines[first - 1 : doc_first - 1] + lines[doc_end:end]
    source = textwrap.dedent("\n".join(kept)).strip()
    return source, doc
