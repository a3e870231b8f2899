"""What is wrong in a document that a person wrote (TOML), told in the words and units of that person."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agent.errors import did_you_mean
from agent.sizes import size_text, unit_of

SHOWN_MAX = 8
_Location = tuple[int | str, ...]


def problems_in(document: Mapping[str, Any], model: type[BaseModel], error: ValidationError) -> str:
    """The first problems, each with its key: what was expected there, and which known word is near."""
    return "; ".join(_problem(document, model, each) for each in error.errors(include_url=False)[:SHOWN_MAX])


def _problem(document: Mapping[str, Any], model: type[BaseModel], found: ErrorDetails) -> str:
    location, limits = found["loc"], found.get("ctx", {})
    text = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    typed = _typed(document, location)
    if found["type"] == "extra_forbidden":
        text = f"unknown key{did_you_mean(str(location[-1]), _keys(model, location[:-1]))}"
    elif found["type"] == "literal_error":
        text += did_you_mean(str(typed), re.findall("'([^']*)'", limits["expected"]))
    elif isinstance(typed, str):
        for limit in (limits[name] for name in ("ge", "gt", "le", "lt") if name in limits):
            text = text.replace(str(limit), size_text(limit, unit_of(typed)))
    return f"{'.'.join(map(str, location)) or 'the file as a whole'}: {text}"


def _typed(document: object, location: _Location) -> object:
    """What stands there in the document; None where it has another shape."""
    for part in location:
        try:
            document = document[part]  # type: ignore[index]
        except (TypeError, LookupError):
            return None
    return document


def _keys(model: type[BaseModel], location: _Location) -> list[str]:
    """The known keys of a section; none where no record tells them."""
    found: Any = model
    for part in location:
        if isinstance(part, str):
            found = found.model_fields[part].annotation
        while get_args(found):
            found = get_args(found)[0]
    return list(getattr(found, "model_fields", ()))
