"""The sub-commands of ``scao``. To add one: a module with a typer function here, and a row in `COMMANDS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Name -> where its function is. The modules import only typer; what a command needs, it imports when it runs.
COMMANDS = {
    "bench": "scao_tools.commands.bench:bench",
    "bench-report": "scao_tools.commands.bench:bench_report",
    "demo": "scao_tools.commands.demo:demo",
}


def load_command(name: str) -> Callable[..., Any]:
    """The function of a sub-command."""
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return command
