"""The requests of the control socket: each is a checked record that carries itself out.

One request is one line of JSON, `{"verb": ..., ...}`; the answer is one line, `{"ok": true, ...}` or
`{"ok": false, "error": "a sentence"}`. A field that a verb does not have is refused. `drive` is a number
from 0; where it may be left out, all drives are meant.
"""

import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.enclosure import AnyDrive, Enclosure
from emulator.jbof.faults import ErrorFault, FlipFault
from nvmeof.controller.storage import Operation
from nvmeof.wire.ana import AnaState
from nvmeof.wire.status import Status

MAX_LINE_BYTES: Final = 64 << 10
"""Of a request; an answer to `stats` may be longer."""

_Probability = Annotated[float, Field(ge=0, le=1, description="Share of the commands that are hit.")]
_AnyDrive = Annotated[int | None, Field(ge=0, description="Number of the drive, from 0; without it, all.")]
_OneDrive = Annotated[int, Field(ge=0, description="Number of the drive, from 0.")]
_Milliseconds = Annotated[float, Field(ge=0, le=3_600_000)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Offset = Annotated[int, Field(ge=0, description="First byte.")]
_Length = Annotated[int, Field(gt=0, description="Bytes.")]
_PortNumber = Annotated[int, Field(ge=1, description="Number of the port, from 1.")]


class RequestError(ValueError):
    """A malformed request: the caller's fault."""


class Access(StrEnum):
    """ANA states by the names of nvme-cli."""

    OPTIMIZED = "optimized"
    NON_OPTIMIZED = "non-optimized"
    INACCESSIBLE = "inaccessible"
    PERSISTENT_LOSS = "persistent-loss"
    CHANGE = "change"


class Request(BaseModel, ABC):
    """`carry_out` returns what the answer has beside `ok`, if anything.

    It raises ValueError, KeyError (no such drive), EnclosureError and OSError, which the caller is told.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def carry_out(self, enclosure: Enclosure) -> dict[str, Any] | None: ...


class _OfDrives(Request):
    drive: _AnyDrive = None

    def carry_out(self, enclosure: Enclosure) -> dict[str, Any]:
        chosen = enclosure.drives if self.drive is None else [enclosure.drive(self.drive)]
        for drive in chosen:
            self.change(drive)
        # Commands that wait on a drive ask it again: it may have been healed.
        enclosure.target.poke()
        return {"drives": [drive.number for drive in chosen]}

    @abstractmethod
    def change(self, drive: AnyDrive) -> None: ...


class StatsRequest(Request):
    """Counters of every drive, as JSON."""

    def carry_out(self, enclosure: Enclosure) -> dict[str, Any]:
        return enclosure.stats()


class SlowRequest(_OfDrives):
    """A slow drive."""

    latency_ms: _Milliseconds = Field(description="Added to every command; 0 takes it away.")

    def change(self, drive: AnyDrive) -> None:
        drive.set_faults(extra_latency_s=self.latency_ms / 1000)


class HangRequest(_OfDrives):
    """A drive that takes commands and never answers, until heal."""

    def change(self, drive: AnyDrive) -> None:
        drive.set_faults(hung=True)


class ErrorRequest(_OfDrives):
    """A drive that fails commands with a status."""

    status: int | str = Field(description="Name (write_fault), or SCT << 8 | SC as a number (0x280).")
    probability: _Probability = 1.0
    operations: tuple[Operation, ...] = Field((), description="Kind of command (repeat); without it, all.")
    do_not_retry: bool = Field(False, description="Set the Do Not Retry bit.")

    def change(self, drive: AnyDrive) -> None:
        status, operations = parse_status(self.status), frozenset(self.operations)
        drive.set_faults(error=ErrorFault(status, self.probability, operations, self.do_not_retry))


class FlipRequest(Request):
    """Flip bits in stored bytes; with --on-read, in returned ones."""

    drive: _OneDrive
    offset: _Offset = 0
    length: int | None = Field(None, gt=0, description="Bytes; without it, to the end.")
    bits: int = Field(1, gt=0, description="How many bits.")
    on_read: bool = Field(False, description="In returned bytes, not in stored ones.")
    probability: _Probability = 1.0

    def carry_out(self, enclosure: Enclosure) -> dict[str, Any]:
        drive = enclosure.drive(self.drive)
        length = self.length or drive.reach - self.offset
        if not self.on_read:
            return {"bytes_changed": drive.flip_at_rest(self.offset, length, self.bits)[:1024]}
        drive.set_faults(flip_on_read=FlipFault(self.offset, length, self.probability, self.bits))
        return {"drives": [self.drive]}


class ZeroRequest(Request):
    """A range of a drive that has become zeros."""

    drive: _OneDrive
    offset: _Offset
    length: _Length

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.drive(self.drive).zero_at_rest(self.offset, self.length)


class CopyRequest(ZeroRequest):
    """A misplaced write: bytes at --source are at --offset, too."""

    offset: _Offset = Field(description="First byte of what is written over.")
    source: _Offset = Field(description="First byte of what is copied.")

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.drive(self.drive).copy_at_rest(self.source, self.offset, self.length)


class FullRequest(_OfDrives):
    """A drive that refuses writes: Capacity Exceeded."""

    def change(self, drive: AnyDrive) -> None:
        drive.set_faults(full=True)


class LoseWritesRequest(_OfDrives):
    """A drive that acknowledges writes and does not store them."""

    probability: _Probability = 1.0

    def change(self, drive: AnyDrive) -> None:
        drive.set_faults(lose_writes=self.probability)


class ModelRequest(_OfDrives):
    """Imitate a drive of this speed. 0 is no limit: without options it is as fast as the machine."""

    read_latency_ms: _Milliseconds = Field(0.0, description="Latency of each read.")
    write_latency_ms: _Milliseconds = Field(0.0, description="Latency of each write.")
    bandwidth_mib_s: _Number = Field(0.0, description="Rate of each drive.")
    iops: _Number = Field(0.0, description="Commands a second of each drive.")
    jitter: float = Field(0.0, ge=0, le=1, description="Spread of the latencies, as a share of them.")
    seed: int = Field(0, description="Seed of the jitter; drive N has this number + N.")

    def change(self, drive: AnyDrive) -> None:
        given = self.model_dump(exclude={"drive", "seed"})
        drive.set_model(DriveModelSettings.of(seed=self.seed + drive.number, **given))


class LinkRequest(Request):
    """Imitate a link of this speed, which all drives share. 0 is no limit."""

    bandwidth_mib_s: _Number = Field(0.0, description="Rate of each way.")

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.link.set_rate(self.bandwidth_mib_s * (1 << 20))


class RemoveRequest(Request):
    """Pull a drive out."""

    drive: _OneDrive

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.remove_drive(self.drive)


class AddRequest(Request):
    """Put a drive back in, or a new one."""

    drive: int | None = Field(None, ge=0, description="A drive that was pulled out; without it, a new one.")
    size: int | None = Field(None, gt=0, description="Of a new one; as the others by default.")

    def carry_out(self, enclosure: Enclosure) -> dict[str, Any]:
        return enclosure.identity(enclosure.add_drive(self.drive, self.size).number)


class HealRequest(_OfDrives):
    """No faults any more. Drives that were pulled out stay out, damaged bytes stay damaged."""

    def change(self, drive: AnyDrive) -> None:
        drive.heal()


class PortRequest(Request):
    """Cut one of several ports off, or serve it again. All its connections end."""

    number: _PortNumber
    up: bool = Field(False, description="Serve it again, or cut it off.")

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.set_port_up(self.number, self.up)


class AccessRequest(Request):
    """How one of several ports reaches the drives (ANA)."""

    number: _PortNumber
    state: Access = Field(description=f"The new state: {', '.join(Access)}.")

    def carry_out(self, enclosure: Enclosure) -> None:
        enclosure.set_access(self.number, AnaState[self.state.name])


class KillRequest(Request):
    """SIGKILL for the whole enclosure."""

    def carry_out(self, enclosure: Enclosure) -> None:
        """The server kills after its answer."""


VERBS: Final[dict[str, type[Request]]] = {
    "stats": StatsRequest, "slow": SlowRequest, "hang": HangRequest, "error": ErrorRequest,
    "flip": FlipRequest, "zero": ZeroRequest, "copy": CopyRequest, "full": FullRequest,
    "lose-writes": LoseWritesRequest, "model": ModelRequest, "link": LinkRequest,
    "remove": RemoveRequest, "add": AddRequest,
    "heal": HealRequest, "port": PortRequest, "access": AccessRequest, "kill": KillRequest,
}  # fmt: skip


def decode_request_untrusted(line: bytes) -> Request:
    """The request of a line. Raises RequestError, with a sentence for the caller."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from None
    return checked_request(raw)


def checked_request(raw: Any) -> Request:
    """The request of decoded JSON. Raises RequestError."""
    if not isinstance(raw, dict) or not isinstance(raw.get("verb"), str):
        raise RequestError("a request is an object with a verb")
    request = VERBS.get(raw["verb"])
    if request is None:
        raise RequestError(f"verb: {not_one_of(raw['verb'], VERBS)}")
    try:
        return request.model_validate({name: value for name, value in raw.items() if name != "verb"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, text = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input ")
        if first["type"] == "enum":
            text = not_one_of(str(first["input"]), re.findall("'([^']*)'", first["ctx"]["expected"]))
        raise RequestError(f"{where}: {text}" if where else text) from None


def parse_status(status: int | str) -> int:
    """An NVMe status by number (`0x281` too) or name (`nvmeof.wire.status`). Raises RequestError."""
    if isinstance(status, int):
        return status
    text = status.strip()
    name = text.upper().replace("-", "_")
    if name in Status.__members__:
        return Status[name]
    try:
        return int(text, 0)
    except ValueError:
        known = [each.lower() for each in Status.__members__ if each != "SUCCESS"]
        raise RequestError(f"{not_one_of(status, known)}; a number (0x281) will do as well") from None


def not_one_of(word: str, known: Iterable[str]) -> str:
    """The refusal of a word that is not a known one: the known ones, and the nearest of them."""
    words = list(known)
    return f"{word!r} is not one of {', '.join(map(repr, words))}{did_you_mean(word, words)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` where a known word is near, whatever its case."""
    words = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(word.casefold(), words, 1)
    return f" (did you mean {words[near[0]]}?)" if near else ""
