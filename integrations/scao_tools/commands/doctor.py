"""``scao doctor``: what is there, what is missing, what does not fit, and the command that mends it."""

from __future__ import annotations

from typing import Annotated

import typer

_SIGNS = {"ok": "ok", "absent": "--", "note": "..", "bad": "!!"}


def doctor(
    framework: Annotated[
        str | None,
        typer.Argument(help="Only this door, which must then work: hf, trl, axolotl, llamafactory, torchtune, litgpt."),
    ] = None,
) -> None:
    """Check versions, doors, registration, GPU and known bad combinations. Exit code 1 if something is wrong."""
    from scao_tools.doctor import BAD, DOORS, examine, examine_process, this_machine
    from scao_tools.environment import prepare_environment
    from scao_tools.errors import OptionError

    if framework is not None and framework not in DOORS:
        raise OptionError(f"unknown framework {framework!r}; known: {', '.join(DOORS)}")
    prepare_environment()
    findings = [*examine(this_machine(), framework), *examine_process()]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        typer.echo(f"{_SIGNS[finding.status]}  {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            typer.echo(f"{'':<{width + 6}}{finding.remedy}")
    wrong = sum(finding.status == BAD for finding in findings)
    typer.echo(f"\n{wrong} to mend" if wrong else "\nnothing to mend")
    raise typer.Exit(1 if wrong else 0)
