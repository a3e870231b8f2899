"""What can be asked of a running enclosure over its control socket, as checked records.

One request is one line of JSON, `{"verb": ..., ...}`; the answer is one line, `{"ok": true, ...}` or
`{"ok": false, "error": "a sentence"}`. A field that a verb does not have is refused. `drive` is a number
from 0; where it may be left out, all drives are meant.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nvmeof.controller.storage import Operation
from nvmeof.wire.status import Status

MAX_LINE_BYTES: Final = 64 << 10
"""Longest request or answer-free line that is read; a stats answer may be longer."""

_Probability = Annotated[float, Field(ge=0, le=1)]
_DriveNumber = Annotated[int, Field(ge=0)]
_Milliseconds = Annotated[float, Field(ge=0, le=3_600_000)]


class RequestError(ValueError):
    """A request that is not one: the caller's fault."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StatsRequest(_Request):
    """Counters and state of everything."""

    verb: Literal["stats"]


class SlowRequest(_Request):
    """Add `latency_ms` to every command; 0 takes it away."""

    verb: Literal["slow"]
    drive: _DriveNumber | None = None
    latency_ms: _Milliseconds


class HangRequest(_Request):
    """Take commands and never answer them, until heal."""

    verb: Literal["hang"]
    drive: _DriveNumber | None = None


class ErrorRequest(_Request):
    """Fail commands with a status: its name (`write_fault`), or SCT << 8 | SC as a number."""

    verb: Literal["error"]
    drive: _DriveNumber | None = None
    status: int | str
    probability: _Probability = 1.0
    operations: tuple[Operation, ...] = ()
    do_not_retry: bool = False


class FlipRequest(_Request):
    """Flip bits in a range of bytes: once in the medium, or `on_read` in what is returned from it."""

    verb: Literal["flip"]
    drive: _DriveNumber
    offset: int = Field(default=0, ge=0)
    length: int | None = Field(default=None, gt=0)
    bits: int = Field(default=1, gt=0)
    on_read: bool = False
    probability: _Probability = 1.0


class ZeroRequest(_Request):
    """Make a range of the medium read as zeros."""

    verb: Literal["zero"]
    drive: _DriveNumber
    offset: int = Field(ge=0)
    length: int = Field(gt=0)


class CopyRequest(_Request):
    """Put the bytes at `source` to `offset` as well: a misplaced or stale block."""

    verb: Literal["copy"]
    drive: _DriveNumber
    source: int = Field(ge=0)
    offset: int = Field(ge=0)
    length: int = Field(gt=0)


class FullRequest(_Request):
    """Refuse writes with Capacity Exceeded."""

    verb: Literal["full"]
    drive: _DriveNumber | None = None


class LoseWritesRequest(_Request):
    """Acknowledge writes and do not store them."""

    verb: Literal["lose-writes"]
    drive: _DriveNumber | None = None
    probability: _Probability = 1.0


class ModelRequest(_Request):
    """Imitate a drive of this speed; what is left out is 0, and 0 is no limit."""

    verb: Literal["model"]
    drive: _DriveNumber | None = None
    read_latency_ms: _Milliseconds = 0.0
    write_latency_ms: _Milliseconds = 0.0
    bandwidth_mib_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    iops: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    jitter: _Probability = 0.0
    seed: int = 0


class RemoveRequest(_Request):
    """Pull a drive out."""

    verb: Literal["remove"]
    drive: _DriveNumber


class AddRequest(_Request):
    """Put a drive back in, or, without a number, a new one of `size` bytes."""

    verb: Literal["add"]
    drive: _DriveNumber | None = None
    size: int | None = Field(default=None, gt=0)


class HealRequest(_Request):
    """No faults any more; drives that were pulled out stay out, damaged bytes stay damaged."""

    verb: Literal["heal"]
    drive: _DriveNumber | None = None


class PortRequest(_Request):
    """Cut a port off with all its connections (`up` false), or serve it again."""

    verb: Literal["port"]
    number: int = Field(ge=1)
    up: bool


class AccessRequest(_Request):
    """How a port reaches the namespaces from now on (ANA)."""

    verb: Literal["access"]
    number: int = Field(ge=1)
    state: Literal["optimized", "non-optimized", "inaccessible", "persistent-loss", "change"]


class KillRequest(_Request):
    """End the enclosure's process with SIGKILL, without a goodbye to anybody."""

    verb: Literal["kill"]


ControlRequest = Annotated[
    StatsRequest
    | SlowRequest
    | HangRequest
    | ErrorRequest
    | FlipRequest
    | ZeroRequest
    | CopyRequest
    | FullRequest
    | LoseWritesRequest
    | ModelRequest
    | RemoveRequest
    | AddRequest
    | HealRequest
    | PortRequest
    | AccessRequest
    | KillRequest,
    Field(discriminator="verb"),
]

_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter(ControlRequest)


def decode_request_untrusted(line: bytes) -> Any:
    """One of the records above. RequestError with a sentence for the caller if it is none."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    try:
        return _ADAPTER.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def parse_status(status: int | str) -> int:
    """An NVMe status by number (`0x281` too) or by name in the table of `nvmeof.wire.status`."""
    if isinstance(status, int):
        return status
    text = status.strip()
    name = text.upper().replace("-", "_")
    if name in Status.__members__:
        return Status[name]
    try:
        return int(text, 0)
    except ValueError:
        known = ", ".join(each.lower() for each in Status.__members__ if each != "SUCCESS")
        raise RequestError(f"no status is called {status!r}; known are {known}") from None
