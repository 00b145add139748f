"""Entry point of the ``scao`` command."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from scao_tools.errors import ToolError

if TYPE_CHECKING:
    import typer

# Not a bug of the program: no space, no permission, read-only.
_ENVIRONMENT_ERRORS = frozenset({errno.ENOSPC, errno.EACCES, errno.EROFS})


def build_app() -> typer.Typer:
    """Assemble the command from the registry of sub-commands."""
    import typer

    from scao_tools.commands import COMMANDS, load_command

    app = typer.Typer(
        name="scao",
        help="Tools around SCAO, a second-order optimizer for fine-tuning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # help and usage errors as plain text, also in log files
    )
    for name in COMMANDS:
        command = load_command(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    app.callback()(_group)  # keeps `scao demo` a sub-command even while it is the only one
    return app


def _group() -> None:
    """Tools around SCAO, a second-order optimizer for fine-tuning."""


def run(app: Callable[..., Any], arguments: Sequence[str]) -> int:
    """Run the command; problems that the user can fix become one sentence on the error stream."""
    try:
        app(args=list(arguments))
    except ToolError as error:
        print(f"scao: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRORS:
            raise
        print(
            f"scao: {error.filename or 'writing'}: {error.strerror}; free space or choose another --out",
            file=sys.stderr,
        )
        return 1
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return 0


def main() -> None:
    """Called by the installed ``scao`` script."""
    from scao_tools.requirements import require

    try:
        require(("typer", "rich"), "demo", "the scao command")
    except ToolError as error:
        print(f"scao: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    for stream in (sys.stdout, sys.stderr):
        # Generated text holds any character; a terminal that cannot show one must not end the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(build_app(), sys.argv[1:]))


if __name__ == "__main__":
    main()
