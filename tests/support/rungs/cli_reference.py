"""The reference of the command line, made from the verbs themselves.

    python -m tests.support.rungs.cli_reference > docs/reference/cli.md

tests/rules/test_docs.py compares the file with what this makes, so the reference cannot fall behind.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from agent.cli.main import PASSED_ON, VERBS
from emulator.lab.cache import REPOSITORY

PASSED_ON_APPS = {
    "jbof": ("emulator.jbof.cli", "app"),
    "lab": ("emulator.lab.cli", "app"),
    "host": ("emulator.lab.host_cli", "app"),
}
HEAD = """\
# The command line

Made from the verbs by `python -m tests.support.rungs.cli_reference`. Edit the help texts in `agent/cli`,
those of `bench` in `agent/bench`, of `replay` in `agent/replay`, of `jbof` in `emulator/jbof`, of `lab` and
`host` in `emulator/lab`.

Exit codes: 0 it worked, 1 it did not, 2 the arguments are wrong, 130 Ctrl-C. A reader of the
output that leaves early (`| head -1`) changes none of them; a closed output (`>&-`) is an error.
Errors come as `error: …` and, where there is advice, `hint: …` on standard error; `G35_DEBUG=1` adds
the traceback.
"""


_CHOICES = re.compile(r"([^<>\[\]]+\|[^<>\[\]]+)")
"""In an option's spelling and type, as its help has them: `--media <files|memory>`, or in square brackets."""


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb, those with verbs of their own too, as (words, click-like command)."""
    for name, verb in VERBS.items():
        yield from _walk(name, _command(_named(verb.module, verb.attribute)))
    for name in PASSED_ON:
        yield from _walk(name, typer.main.get_command(_named(*PASSED_ON_APPS[name])))


def _named(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(module), attribute)


def _command(target: Any) -> Any:
    """As agent/cli/main.py makes it. A group by itself would have options for the completion of shells."""
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
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
        rows = [_row(spelling, parameter, command) for spelling, parameter in options_of(command)]
        if rows:
            parts.append("\n| | default | |\n| --- | --- | --- |\n" + "".join(rows))
    return "".join(parts)


def _row(spelling: str, parameter: Any, command: Any) -> str:
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif default is None or default == "" or callable(default) or default == []:
        shown = ""
    elif default == REPOSITORY:
        shown = "the checkout"
    elif isinstance(default, bool):
        shown = "yes" if default else "no"
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    text = _one_paragraph(getattr(parameter, "help", "") or "")
    choices = choices_of(parameter, command)
    if not all(re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text) for each in choices):
        text += f" Choices: {', '.join(f'`{each}`' for each in choices)}."
    text = text.replace("|", "\\|")
    return f"| `{spelling}` | {shown} | {text} |\n"


def choices_of(parameter: Any, command: Any) -> list[str]:
    """The words that an option or argument takes; none where it takes any."""
    record = parameter.get_help_record(typer.Context(command))
    found = _CHOICES.search(record[0]) if record is not None else None
    return found[1].split("|") if found is not None else []


def _one_paragraph(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


if __name__ == "__main__":
    print(reference(), end="")
