"""What a door needs: one sentence with the pip command where it is missing."""

from __future__ import annotations

import importlib
import re

from scao_core import ScaoError


class FrameworkError(ScaoError, ImportError):
    """A framework is missing, or its version does not fit; the message has the command that brings the right one."""


def require(package: str, oldest: str, door: str, command: str) -> None:
    """Import a package and check its version.

    Args:
        oldest: the first version that works, e.g. ``"4.48"``; major and minor are compared.
        door: what needs it, for the sentence.
        command: what to run where it is missing.

    Raises:
        FrameworkError: it does not import, or is too old.
    """
    wanted = f"SCAO's {door.removeprefix('the ')} needs {package} >= {oldest}"
    try:
        found = str(importlib.import_module(package).__version__)
    except ImportError as error:
        raise FrameworkError(f"{wanted}, which does not import ({error}); run: {command}") from error
    if version(found) < version(oldest):
        raise FrameworkError(f"{wanted}, found {found}; run: {command}")


def version(text: str) -> list[int]:
    """Major and minor, for comparisons."""
    return [int(n) for n in re.findall(r"\d+", text)[:2]]
