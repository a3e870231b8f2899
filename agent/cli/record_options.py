"""The fields of a record as the options of a verb, so that an option is stated once; options with a unit."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

R = TypeVar("R")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def options_of(record: type[R]) -> Callable[[Callable[[typer.Context, R], None]], Callable[..., None]]:
    """Make a verb of a function that takes the record. Each field is an option, as typer has them."""

    def made(verb: Callable[[typer.Context, R], None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(context: typer.Context, **words: Any) -> None:
            verb(context, record(**words))

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        fields = inspect.signature(record, eval_str=True).parameters.values()
        options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fields]
        command.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
        return command

    return made


def path_of(text: str) -> Path:
    """The parser of an option: a path. No words are not the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


def text_for(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The callback of an option whose text `parse` takes, or that is empty. The text stays, for its unit."""

    def check(text: str) -> str:
        try:
            if text:
                parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return check
