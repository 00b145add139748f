"""The sub-commands of ``scao``. To add one: a module with a function for typer, or a group of them, and a row in `COMMANDS`."""

from __future__ import annotations

import importlib
from typing import Any

# Name -> where its function is. The modules import only typer; what a command needs, it imports when it runs.
COMMANDS = {
    "bench": "scao_tools.commands.bench:bench",
    "bench-report": "scao_tools.commands.bench:bench_report",
    "demo": "scao_tools.commands.demo:demo",
    "doctor": "scao_tools.commands.doctor:doctor",
    "plan": "scao_tools.commands.plan:plan",
    "recipe": "scao_tools.commands.recipe:app",
}


def load_command(name: str) -> Any:
    """The function of a sub-command, or the ``typer.Typer`` of a group."""
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
