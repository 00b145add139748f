"""The versions that a result is reported with."""

from __future__ import annotations

import importlib.metadata
import platform

_PACKAGES = ("scao", "torch", "transformers", "peft", "bitsandbytes")


def versions() -> dict[str, str]:
    """Python and the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
