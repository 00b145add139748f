"""Check optional dependencies before any work, so that a missing one is a sentence and not a traceback."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from scao_tools.errors import MissingPackageError

DEMO_MODULES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "gguf", "matplotlib", "rich", "typer")


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a half-initialized module in sys.modules has no __spec__
        return False


def require(modules: Iterable[str], extra: str, purpose: str) -> None:
    """Raise `MissingPackageError` naming every missing module and the one command that installs them."""
    missing = [module for module in modules if not is_installed(module)]
    if not missing:
        return
    names = ", ".join(missing)
    raise MissingPackageError(f'{purpose} needs {names}, which is not installed; run: pip install "scao[{extra}]"')
