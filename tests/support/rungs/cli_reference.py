"""The reference of the command line, made from the verbs themselves.

    python -m tests.support.rungs.cli_reference > docs/reference/cli.md

tests/rules/test_docs.py compares the file with what this makes, so the reference cannot fall behind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from agent.cli.main import PASSED_ON, VERBS

PASSED_ON_APPS = {
    "jbof": ("emulator.jbof.cli", "app"),
    "lab": ("emulator.lab.cli", "app"),
    "host": ("emulator.lab.host_cli", "app"),
}
HEAD = """\
# The command line

Made from the verbs by `python -m tests.support.rungs.cli_reference`; edit the help texts in `agent/cli`.

Exit codes: 0 it worked, 1 it did not, 2 the arguments are wrong, 130 Ctrl-C. A reader of the
output that leaves early (`| head -1`) changes none of them; a closed output (`>&-`) is an error.
Errors come as `error: …` and, where there is advice, `hint: …` on standard error; `G35_DEBUG=1` adds
the traceback.
"""


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb, those with verbs of their own too, as (words, click-like command)."""
    for name, verb in VERBS.items():
        yield from _walk(name, _command(verb.module, verb.attribute))
    for name in PASSED_ON:
        yield from _walk(name, _command(*PASSED_ON_APPS[name]))


def _command(module: str, attribute: str) -> Any:
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    application = typer.Typer(add_completion=False)
    application.command()(target)
    return typer.main.get_command(application)


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _walk(f"{words} {name}", below)


def options_of(command: Any) -> Iterator[tuple[str, Any]]:
    """(spelling, parameter) of every option and argument but --help."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield str(parameter.name).upper(), parameter
        elif "--help" not in parameter.opts and not getattr(parameter, "hidden", False):
            yield " / ".join([*parameter.opts, *parameter.secondary_opts]), parameter


def reference() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD]
    for words, command in verbs():
        below = list(getattr(command, "commands", {}))
        parts.append(f"\n## `g35 {words}`\n")
        parts.append("\n" + _one_paragraph(command.help or VERBS[words].summary) + "\n")
        if below:
            parts.append("\nVerbs: " + ", ".join(f"`{name}`" for name in below) + ".\n")
        rows = [_row(spelling, parameter) for spelling, parameter in options_of(command)]
        if rows:
            parts.append("\n| | default | |\n| --- | --- | --- |\n" + "".join(rows))
    return "".join(parts)


def _row(spelling: str, parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif default is None or default == "" or callable(default) or default == []:
        shown = ""
    elif str(default).startswith("/"):
        shown = ""  # a folder of this machine: the help text says which
    elif isinstance(default, bool):
        shown = "yes" if default else "no"
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    text = _one_paragraph(getattr(parameter, "help", "") or "").replace("|", "\\|")
    return f"| `{spelling}` | {shown} | {text} |\n"


def _one_paragraph(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


if __name__ == "__main__":
    print(reference(), end="")
