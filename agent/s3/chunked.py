"""Bodies in signed chunks (`Content-Encoding: aws-chunked`), decoded as they come.

"Signature Calculations for the Authorization Header: Transferring Payload in Multiple Chunks" and "Trailing
headers" of Amazon's S3 API reference. A body is chunks, an empty one, and trailers where the payload's word
ends in -TRAILER:

    hex length [;chunk-signature=64 hex digits] CRLF  data  CRLF
    0 [;chunk-signature=...] CRLF
    [name:value CRLF ...  x-amz-trailer-signature:64 hex digits CRLF]  CRLF

Data is passed on before its chunk's signature is checked, and each signature is checked before the next chunk
is read. So data must not become visible before `finish`.
"""

import enum
import hashlib
import hmac
import re
from typing import Final

from agent.s3.errors import S3Error
from agent.s3.signature import EMPTY_SHA256, Signer

CHUNK_BYTES_MIN: Final = 8192
"""Of every chunk but the last, as with S3: each costs the event loop some work."""
LINE_BYTES_MAX: Final = 1024
TRAILER_BYTES_MAX: Final = 4096
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})(?:;chunk-signature=([0-9a-f]{64}))?")
_NAME = re.compile(rb"[A-Za-z0-9-]{1,64}")
_VALUE = re.compile(rb"[!-~ ]*")

SIGNED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
SIGNED_TRAILER: Final = SIGNED + "-TRAILER"
UNSIGNED_TRAILER: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
WORDS: Final = frozenset({SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER})


class _State(enum.Enum):
    HEADER = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()
    DONE = enum.auto()


class ChunkDecoder:
    """One body. `feed` takes received bytes and returns the data in them; `finish` ends it."""

    def __init__(self, signer: Signer, length: int) -> None:
        """`length`: announced bytes of data (x-amz-decoded-content-length)."""
        self._signer = signer
        self._signed = signer.payload != UNSIGNED_TRAILER
        self._has_trailer = signer.payload != SIGNED
        self._previous = signer.signature
        self._left = length
        self._state = _State.HEADER
        self._line = bytearray()
        self._chunk_left = 0
        self._is_short = False
        self._claimed = ""
        self._hash = hashlib.sha256()
        self._trailer_bytes = 0
        self._trailer_signature = ""
        self.trailers: dict[str, str] = {}

    def feed(self, data: bytes) -> list[memoryview]:
        """Raises S3Error for a malformed body or a wrong signature."""
        found: list[memoryview] = []
        view, at = memoryview(data), 0
        while at < len(view):
            if self._state is _State.DATA:
                piece = view[at : at + self._chunk_left]
                at += len(piece)
                self._chunk_left -= len(piece)
                if self._signed:
                    self._hash.update(piece)
                found.append(piece)
                if not self._chunk_left:
                    self._end_chunk()
                    self._state = _State.DATA_END
                continue
            if self._state is _State.DONE:
                raise _malformed("there is more after its end")
            end = data.find(b"\n", at)
            stop = len(data) if end < 0 else end + 1
            self._line += view[at:stop]
            at = stop
            if len(self._line) > LINE_BYTES_MAX:
                raise _malformed("a line is too long")
            if end >= 0:
                if not self._line.endswith(b"\r\n"):
                    raise _malformed("a line has no CRLF")
                line = bytes(self._line[:-2])
                self._line.clear()
                self._take_line(line)
        return found

    def finish(self) -> None:
        """End the body. Raises S3Error where it is incomplete."""
        if self._state is not _State.DONE or self._left:
            raise S3Error("IncompleteBody", "The body has fewer bytes than were announced.", closes=True)

    def _take_line(self, line: bytes) -> None:
        if self._state is _State.HEADER:
            self._begin_chunk(line)
        elif self._state is _State.DATA_END:
            if line:
                raise _malformed("a chunk is longer than it says")
            self._state = _State.HEADER
        else:
            self._take_trailer(line)

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK.fullmatch(line)
        if match is None or self._signed != (match[2] is not None):
            raise _malformed("a chunk does not begin as one")
        length = int(match[1], 16)
        if length > self._left:
            raise _malformed("there is more data than was announced")
        if length and self._is_short:
            message = f"A chunk but the last has {CHUNK_BYTES_MIN} bytes at the least."
            raise S3Error("InvalidChunkSizeError", message, closes=True)
        self._is_short = length < CHUNK_BYTES_MIN
        self._left -= length
        self._claimed = (match[2] or b"").decode()
        self._hash = hashlib.sha256()
        self._chunk_left = length
        self._state = _State.DATA
        if not length:
            self._end_chunk()
            self._state = _State.TRAILER

    def _end_chunk(self) -> None:
        if self._signed:
            hashes = f"{EMPTY_SHA256}\n{self._hash.hexdigest()}"
            self._check(self._signer.chunk_signature(self._previous, hashes), self._claimed)
            self._previous = self._claimed

    def _check(self, expected: str, claimed: str) -> None:
        if not hmac.compare_digest(expected, claimed):
            raise S3Error("SignatureDoesNotMatch", "A part of the body is not its signer's.", closes=True)

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self._end_trailers()
            return
        self._trailer_bytes += len(line)
        before, colon, after = line.partition(b":")
        after = after.strip(b" \t")
        is_fit = colon and _NAME.fullmatch(before) and _VALUE.fullmatch(after)
        if not self._has_trailer or not is_fit or self._trailer_bytes > TRAILER_BYTES_MAX:
            raise _malformed("its trailers are not in their form")
        name, value = before.decode().lower(), after.decode()
        if name in self.trailers or self._trailer_signature:
            raise _malformed("a trailer is there twice, or after the signature")
        if name == "x-amz-trailer-signature":
            self._trailer_signature = value or "-"
        else:
            self.trailers[name] = value

    def _end_trailers(self) -> None:
        if self._signed and self._has_trailer:
            text = "".join(f"{name}:{value}\n" for name, value in self.trailers.items())
            hashes = hashlib.sha256(text.encode()).hexdigest()
            expected = self._signer.chunk_signature(self._previous, hashes, "TRAILER")
            self._check(expected, self._trailer_signature or "-")
        self._state = _State.DONE


def _malformed(why: str) -> S3Error:
    return S3Error("IncompleteBody", f"The body in chunks is not in its form: {why}.", closes=True)
