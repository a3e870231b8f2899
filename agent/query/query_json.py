"""What routers ask, and what they are told: JSON.

    {"volume": "kv", "prompts": [["000102...1f", ...], ...]}

A prompt is a list of keys, 32 hexadecimal digits each, or one text of all their digits. With `names`, a
prompt is a list of an engine's hashes in hexadecimal, and `names` says how its connector makes keys of them
(`NameForm` of host_shim/control_wire.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent.pool.read.leading_run import LeadingRun
from host_shim.control_wire import (
    KEY_BYTES,
    VOLUME_NAME_BYTES_MAX,
    MalformedControl,
    NameForm,
    decode_name_form_untrusted,
    key_of_long_name,
)

KEYS_MAX: Final = 8192
"""Of all prompts of a request. Of blocks of 16 tokens that is a prompt of 131,072 tokens."""
PROMPTS_MAX: Final = 1024
HASH_BYTES_MAX: Final = 64
FIELDS: Final = ("volume", "prompts", "names")
_FIELDS_NAMED: Final = f"{', '.join(FIELDS[:-1])} and {FIELDS[-1]}"
NAMED_CHARACTERS: Final = 40
"""Of a field that is unknown, so many are told."""
BODY_BYTES_MAX: Final = 1 << 20
"""All keys, or hashes of 32 bytes, with room for brackets and commas."""


class BadQuery(Exception):
    """The request is not answered: `status` of HTTP, and why."""

    def __init__(self, status: int, why: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Query:
    """Prompts, each as its keys of 16 bytes, one behind the other."""

    volume: str
    prompts: list[bytes]

    @property
    def key_count(self) -> int:
        return sum(map(len, self.prompts)) // KEY_BYTES


def decode_query_untrusted(body: bytes | bytearray) -> Query:
    """A query out of a request's body. Bad bytes raise BadQuery, and nothing else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadQuery(400, "the body is no JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise BadQuery(400, f"a query is an object of {_FIELDS_NAMED}")
    unknown = next((field for field in found if field not in FIELDS), None)
    if unknown is not None:
        raise BadQuery(
            400, f"{ascii(unknown)[:NAMED_CHARACTERS]} is no field of a query: those are {_FIELDS_NAMED}"
        )
    volume, prompts = found.get("volume"), found.get("prompts")
    if not isinstance(volume, str) or not 0 < len(volume) <= VOLUME_NAME_BYTES_MAX:
        raise BadQuery(400, f"volume is a name of 1 to {VOLUME_NAME_BYTES_MAX} bytes")
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= PROMPTS_MAX:
        raise BadQuery(400, f"prompts is a list of 1 to {PROMPTS_MAX} prompts")
    form = None
    if "names" in found:
        try:
            form = decode_name_form_untrusted(found["names"])
        except MalformedControl as malformed:
            raise BadQuery(400, f"names: {malformed}") from None
    left, decoded = KEYS_MAX, []
    for prompt in prompts:
        keys = _keys(prompt, form, left)
        left -= len(keys) // KEY_BYTES
        decoded.append(keys)
    return Query(volume, decoded)


def _keys(prompt: Any, form: NameForm | None, most: int) -> bytes:
    """The keys of one prompt, `most` of them at the most. Raises BadQuery."""
    if isinstance(prompt, str) and form is None:
        _check_count(len(prompt) // (2 * KEY_BYTES), most)
        whole = _unhexed(prompt)
        if len(whole) % KEY_BYTES or len(prompt) != 2 * len(whole):
            raise BadQuery(400, f"a prompt in one text has {2 * KEY_BYTES} digits for each key")
        return whole
    if not isinstance(prompt, list):
        raise BadQuery(400, "a prompt is a list of texts, or one text of keys")
    _check_count(len(prompt), most)
    if form is None:
        # A set of one element, where all is well, rather than a look in Python at each key.
        try:
            digits = "".join(prompt)
        except TypeError:
            digits = None
        if digits is None or not set(map(len, prompt)) <= {2 * KEY_BYTES}:
            raise BadQuery(400, f"a key has {2 * KEY_BYTES} digits; hashes of an engine want names")
        return _keys(digits, None, most)
    hashes = [_unhexed(each) for each in prompt]
    if any(not 0 < len(each) <= HASH_BYTES_MAX for each in hashes):
        raise BadQuery(400, f"a hash has 1 to {HASH_BYTES_MAX} bytes")
    return b"".join([key_of_long_name(form.name(each)) for each in hashes])


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise BadQuery(413, f"a request has {KEYS_MAX} keys at the most: ask in several")


def _unhexed(digits: Any) -> bytes:
    try:
        return bytes.fromhex(digits)
    except (ValueError, TypeError):
        raise BadQuery(400, "a prompt is in hexadecimal digits") from None


def answer_for(prompt: bytes, run: LeadingRun, load: float | None, compute: float | None) -> Any:
    """What is told of one prompt. `load`, `compute`: seconds for all of the run, where they are known."""
    told: dict[str, Any] = {
        "keys": len(prompt) // KEY_BYTES,
        "run": run.length,
        "memory": run.in_memory,
        "flash": run.on_flash,
        "g4": run.in_g4,
        "bytes": run.value_bytes,
        "load_ms": None if load is None else round(load * 1e3, 3),
        "compute_ms": None if compute is None else round(compute * 1e3, 3),
        "hole": None,
    }
    if run.hole is not None:
        told["hole"] = {"at": run.length, "cause": run.hole.name.lower()}
    return told


def encode(document: Any) -> bytes:
    """Compact JSON with a newline at its end."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
