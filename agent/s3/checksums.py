"""The checksums that a client announces for a body: SHA-256, Content-MD5, x-amz-checksum-*."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from awscrt import checksums

from agent.s3.errors import S3Error

PREFIX: Final = "x-amz-checksum-"


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A CRC with the interface of hashlib; S3 writes checksums big-endian."""

    def __init__(self, function: Callable[[Any, int], int], size: int) -> None:
        self._function = function
        self._size = size
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


ALGORITHMS: Final[Mapping[str, Callable[[], _Digest]]] = {
    "crc32": lambda: _Crc(checksums.crc32, 4),
    "crc32c": lambda: _Crc(checksums.crc32c, 4),
    "crc64nvme": lambda: _Crc(checksums.crc64nvme, 8),
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
}


class BodyChecks:
    """The checks of one body: `update` with each piece, then `finish`. Raises S3Error."""

    def __init__(self, headers: Mapping[str, str], payload: str) -> None:
        """`payload`: x-amz-content-sha256, a hash where it has 64 hex digits."""
        self._expected: dict[str, bytes] = {}
        self._digests: dict[str, _Digest] = {"md5": hashlib.md5(usedforsecurity=False)}
        self._trailer = ""
        if "content-md5" in headers:
            self._expected["md5"] = _decoded(headers["content-md5"], 16)
        if len(payload) == 64:
            self._digests["payload"] = hashlib.sha256()
            try:
                self._expected["payload"] = bytes.fromhex(payload)
            except ValueError:
                raise S3Error("InvalidArgument", "x-amz-content-sha256 is no hash.") from None
        named = [name for name in ALGORITHMS if PREFIX + name in headers]
        trailer = headers.get("x-amz-trailer", "").strip().lower()
        if trailer:
            self._trailer = trailer.removeprefix(PREFIX)
            if not trailer.startswith(PREFIX) or self._trailer not in ALGORITHMS or named:
                raise S3Error("InvalidRequest", "x-amz-trailer names no checksum, or there is one already.")
        if len(named) > 1:
            raise S3Error("InvalidRequest", "A request has at most one checksum.")
        self.algorithm = self._trailer or (named[0] if named else "")
        if self.algorithm:
            self._digests[self.algorithm] = ALGORITHMS[self.algorithm]()
        if named:
            size = len(ALGORITHMS[named[0]]().digest())
            self._expected[named[0]] = _decoded(headers[PREFIX + named[0]], size)

    @classmethod
    def computing(cls, algorithm: str) -> "BodyChecks":
        """For bytes that no client announced: MD5 and, if there is one, `algorithm`."""
        made = cls({}, "")
        if algorithm:
            made.compute(algorithm)
        return made

    def compute(self, algorithm: str) -> None:
        """Compute a checksum where the client gave none."""
        if not self.algorithm:
            self.algorithm = algorithm
            self._digests[algorithm] = ALGORITHMS[algorithm]()

    def update(self, piece: memoryview) -> None:
        for digest in self._digests.values():
            digest.update(piece)

    def finish(self, trailers: Mapping[str, str]) -> None:
        if any(not self._trailer or name != PREFIX + self._trailer for name in trailers):
            raise S3Error("InvalidRequest", "There is a trailer that x-amz-trailer does not name.")
        if self._trailer:
            size = len(self._digests[self._trailer].digest())
            self._expected[self._trailer] = _decoded(trailers.get(PREFIX + self._trailer, ""), size)
        for name, expected in self._expected.items():
            if not hmac.compare_digest(self._digests[name].digest(), expected):
                if name == "payload":
                    raise S3Error(
                        "XAmzContentSHA256Mismatch", "The body is not what x-amz-content-sha256 says."
                    )
                raise S3Error("BadDigest", f"The body is not what its {name} says.")

    @property
    def md5(self) -> str:
        return self._digests["md5"].digest().hex()

    @property
    def checksum(self) -> str:
        """Such as `crc32:BASE64`; empty where the client gave none."""
        if not self.algorithm:
            return ""
        return f"{self.algorithm}:{base64.b64encode(self._digests[self.algorithm].digest()).decode()}"


def _decoded(text: str, size: int) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != size:
        raise S3Error("InvalidDigest", "A checksum is not in its form.")
    return found
