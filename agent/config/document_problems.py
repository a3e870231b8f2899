"""TOML that a person wrote: read, checked, and its faults told in the words and units of that person."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agent.errors import ConfigError, did_you_mean
from agent.sizes import size_text, unit_of

SHOWN_MAX = 8
_Location = tuple[int | str, ...]


def toml_in(path: Path, text: Callable[[], str]) -> dict[str, Any]:
    """The document in a file, by its text. Raises ConfigError where it cannot be read, or is no TOML."""
    try:
        return tomllib.loads(text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend the line that it names") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", "no key needs that") from None
    except ValueError:  # An integer of more digits than Python reads.
        raise ConfigError(f"{path} has a number that is too long", "mend it") from None


def parse_address(text: str, least_port: int = 0) -> tuple[str, int]:
    """The address and the port of `ADDRESS:PORT` or `[ADDRESS]:PORT`. ValueError if it is neither."""
    address, colon, port = text.rpartition(":")
    bare = address.removeprefix("[").removesuffix("]")
    right = address == (f"[{bare}]" if ":" in bare else bare)
    if not colon or not bare or not right or not port.isascii() or not port.isdecimal():
        raise ValueError(f"{text!r} is no ADDRESS:PORT")
    if not least_port <= int(port) <= 65_535:
        raise ValueError(f"{text!r}: a port is between {least_port} and 65535")
    return bare, int(port)


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
