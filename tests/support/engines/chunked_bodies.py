"""Bodies of S3 in chunks, as a client with a key makes them."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence

from agent.s3.chunked import SIGNED, UNSIGNED_TRAILER
from agent.s3.signature import EMPTY_SHA256, Signer


def crc32_of(data: bytes) -> str:
    """As in `x-amz-checksum-crc32`."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()


def chunked_body(signer: Signer, parts: Sequence[bytes], trailers: Mapping[str, str]) -> bytes:
    """The parts as chunks and an empty one, signed where the signer's word says so, and the trailers."""
    is_signed, previous, body = signer.payload != UNSIGNED_TRAILER, signer.signature, bytearray()
    for part in (*[each for each in parts if each], b""):
        body += f"{len(part):x}".encode()
        if is_signed:
            previous = signer.chunk_signature(previous, f"{EMPTY_SHA256}\n{hashlib.sha256(part).hexdigest()}")
            body += f";chunk-signature={previous}".encode()
        body += b"\r\n" + part + (b"\r\n" if part else b"")
    text = "".join(f"{name}:{value}\n" for name, value in trailers.items())
    body += text.replace("\n", "\r\n").encode("latin-1")
    if is_signed and signer.payload != SIGNED:
        signature = signer.chunk_signature(previous, hashlib.sha256(text.encode()).hexdigest(), "TRAILER")
        body += f"x-amz-trailer-signature:{signature}\r\n".encode()
    return bytes(body) + b"\r\n"
