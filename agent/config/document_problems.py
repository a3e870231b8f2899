"""TOML that a person wrote: read, checked, and its faults told in the words and units of that person."""

import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from agent.errors import ConfigError, did_you_mean, expected_there, shown_name
from agent.host_os.fifo import open_to_read
from agent.sizes import size_text, unit_of

SHOWN_MAX = 8
DOCUMENT_BYTES_MAX = 4 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_WITH_SLASH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_Location = tuple[int | str, ...]
M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """A table of such a document: a key that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def toml_in(path: Path) -> dict[str, Any]:
    """The document in a file. Raises ConfigError where it cannot be read, is too long, or is no TOML."""
    try:
        with open_to_read(path) as file:
            raw = file.read(DOCUMENT_BYTES_MAX + 1)
        if len(raw) > DOCUMENT_BYTES_MAX:
            raise ConfigError(f"{path} is longer than {DOCUMENT_BYTES_MAX} bytes", "is it the right file?")
        return tomllib.loads(raw.decode())
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


def want_once(names: Iterable[object], otherwise: str) -> None:
    """Raises ValueError where one of the names comes twice; `otherwise` says so."""
    all_names = list(names)
    if len(set(all_names)) < len(all_names):
        raise ValueError(otherwise)


def matching(allowed: re.Pattern[str], most: int, otherwise: str) -> AfterValidator:
    """Text of up to `most` characters that a pattern describes as a whole; `otherwise` tells the rule."""

    def check(text: str) -> str:
        if len(text) > most or allowed.fullmatch(text) is None:
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


def name_of_letters(most: int, marks: str = "'.', '_' and '-'") -> AfterValidator:
    """A name that is typed; with '/' among the marks, it may have that as well."""
    allowed = _NAME_WITH_SLASH if "/" in marks else _NAME
    begins = "begin with a letter or a digit"
    return matching(allowed, most, f"should have 1 to {most} letters, digits, {marks}, and {begins}")


def bare_address(text: str) -> str:
    """An IP address without brackets, or a host name. Raises ValueError for what is neither."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        is_ip = bool(ipaddress.ip_address(bare))
    except ValueError:
        is_ip = False
    if is_ip and (bare == text or ":" in bare):
        return bare
    if _HOST_NAME.fullmatch(text) is None:
        host, colon, port = text.rpartition(":")
        if colon and port.isdecimal() and _HOST_NAME.fullmatch(host):
            raise ValueError(f"{text!r} has a port in it, which has a key of its own: port = {port}")
        raise ValueError(f"{text!r} is neither an IP address nor a host name")
    return text


HostAddress = Annotated[str, AfterValidator(bare_address)]
"""An IP address, an IPv6 one in brackets or without, or a host name."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(
            f"'{path}' is no absolute path: g35 mount, a unit and you start in different folders"
        )
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
"""A path that means the same wherever the program that reads it was started."""


def checked(document: Mapping[str, Any], model: type[M], refusal: str, advice: str) -> M:
    """What a document says. Raises ConfigError: `refusal`, and the first problems, each with its key, what
    was expected there, and which known word is near."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)[:SHOWN_MAX]
    problems = "; ".join(_problem(document, model, each) for each in found)
    raise ConfigError(f"{refusal}: {problems}", advice)


def _problem(document: Mapping[str, Any], model: type[BaseModel], found: ErrorDetails) -> str:
    location, limits = found["loc"], found.get("ctx", {})
    text = expected_there(found)
    typed = _typed(document, location)
    if found["type"] == "extra_forbidden":
        text = f"unknown key{_where_known(model, location)}"
    elif found["type"] == "literal_error":
        text += did_you_mean(str(typed), re.findall("'([^']*)'", limits["expected"]))
    elif isinstance(typed, str):
        for limit in (limits[name] for name in ("ge", "gt", "le", "lt") if name in limits):
            text = text.replace(str(limit), size_text(limit, unit_of(typed)))
    return f"{'.'.join(shown_name(str(part)) for part in location) or 'the file as a whole'}: {text}"


def _typed(document: object, location: _Location) -> object:
    """What stands there in the document; None where it has another shape."""
    for part in location:
        try:
            document = document[part]  # type: ignore[index]
        except (TypeError, LookupError):
            return None
    return document


def _where_known(model: type[BaseModel], location: _Location) -> str:
    """Of an unknown key: its plural or singular in its own section, or the sections that have one
    of just that name, or the nearest key of its own."""
    key, own = str(location[-1]), _keys(model, location[:-1])
    sections = {name: _keys(model, (name,)) for name in model.model_fields}
    homes = [f"[{name}]" for name, keys in sections.items() if key in keys]
    if homes and not {f"{key}s", key.removesuffix("s")} & set(own):
        return f" here; it is one of {' and '.join(homes)}"
    return did_you_mean(key, own)


def _keys(model: type[BaseModel], location: _Location) -> list[str]:
    """The known keys of a section; none where no record tells them."""
    found: Any = model
    for part in location:
        if isinstance(part, str):
            found = found.model_fields[part].annotation
        while get_args(found):
            found = get_args(found)[0]
    return list(getattr(found, "model_fields", ()))
