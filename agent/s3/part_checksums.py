"""The checksum of a multipart object, from those of its parts ("Checking object integrity", S3 user guide).

A *full object* checksum is that of all bytes, and CRCs of parts combine to it. A *composite* one is the
checksum of the parts' checksums, and may end in `-` and the number of parts.
"""

import base64
import hmac
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Final

from awscrt import checksums

from agent.http.gil_yield import with_rests
from agent.s3.checksums import ALGORITHMS, PREFIX
from agent.s3.errors import S3Error
from agent.s3.index import Part

_COMBINE: Final[Mapping[str, Callable[[int, int, int], int]]] = {
    "crc32": checksums.combine_crc32,
    "crc32c": checksums.combine_crc32c,
    "crc64nvme": checksums.combine_crc64nvme,
}
FULL, COMPOSITE = "FULL_OBJECT", "COMPOSITE"


def whole_checksum(headers: Mapping[str, str], parts: Sequence[Part]) -> str:
    """`crc32:BASE64` and the like, where `headers` of CompleteMultipartUpload have that of the full object.

    Empty where they have none, or a composite one. Raises S3Error where it is wrong, or cannot be checked.
    """
    named = [name for name in ALGORITHMS if PREFIX + name in headers]
    if not named:
        return ""
    if len(named) > 1:
        raise S3Error("InvalidRequest", "A request has at most one checksum.")
    [name] = named
    said, dash, count = headers[PREFIX + name].partition("-")
    kind = headers.get(PREFIX + "type", "").upper()
    if kind not in ("", FULL, COMPOSITE) or (dash and (kind == FULL or count != str(len(parts)))):
        raise S3Error("InvalidRequest", "That is no checksum of an object of so many parts.")
    digests = []
    for part in with_rests(parts):
        algorithm, _, value = part.checksum.partition(":")
        if algorithm != name:
            raise S3Error("InvalidRequest", f"The parts have no {name}, so that of the whole cannot be told.")
        digests.append(base64.b64decode(value))
    # A checksum without a kind may be either, except crc64nvme, of which there is one kind.
    if kind != COMPOSITE and not dash and name in _COMBINE and _is(said, _full(name, parts, digests)):
        return f"{name}:{said}"
    if kind != FULL and name != "crc64nvme" and _is(said, _composite(name, digests)):
        return ""
    raise S3Error("BadDigest", f"The object is not what its {name} says.")


def _is(said: str, digest: bytes) -> bool:
    return hmac.compare_digest(said.encode(), base64.b64encode(digest))


def _full(name: str, parts: Sequence[Part], digests: Sequence[bytes]) -> bytes:
    combine = _COMBINE[name]
    pairs = zip(digests, (part.piece.size for part in with_rests(parts)), strict=True)
    # The CRC of no bytes is 0, whatever the polynomial.
    value = reduce(lambda so_far, pair: combine(so_far, int.from_bytes(pair[0]), pair[1]), pairs, 0)
    return value.to_bytes(len(digests[0]))


def _composite(name: str, digests: Sequence[bytes]) -> bytes:
    made = ALGORITHMS[name]()
    made.update(memoryview(b"".join(digests)))
    return made.digest()
