"""A client of the S3 door that moves objects by RDMA: the door's other end in bench and tests.

It speaks HTTP/1.1 over one connection, from the address of its RDMA device, and signs as an SDK does.
Objects move from and to memory that it registered. It compares the checksum of every answer with its
memory.
"""

import base64
import http.client
import time
from collections.abc import Mapping
from typing import Final

from awscrt import checksums

from agent.s3.credentials import AccessKey
from agent.s3.rdma.service import CONTROL, CRC
from agent.s3.rdma.token import BYTES, PSN, REPLY, SESSION, TOKEN, Memory, encode_pair, parse_reply
from agent.s3.requests import http_request
from agent.s3.signature import ALGORITHM, UNSIGNED, canonical_request, signature_of, signing_key
from nvmeof.rdma.work import Access, Region
from nvmeof.transport.rdma_direct import DirectDevice, DirectPair, PairEnd
from nvmeof.transport.verbs_provider import load_verbs

REGION: Final = "us-east-1"
TIMEOUT_S: Final = 60.0
HEADS_MAX: Final = 256
HEADS_SECONDS: Final = 5.0
"""A signature serves again for so long: the door takes fresh ones alone (agent/s3/rdma/connections.py)."""


class Refused(Exception):
    """The door refused a request: an HTTP status, the door's words, and the headers of its answer."""

    def __init__(self, status: int, words: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status
        self.words = words
        self.headers = headers


class WrongBytes(Exception):
    """The checksum of an answer is not that of this client's memory."""


class S3RdmaClient:
    """One HTTP connection and one RDMA connection. Used by one thread; `close` it."""

    def __init__(
        self, host: str, port: int, key: AccessKey, provider: str, address: str, source: str = ""
    ) -> None:
        """`address` of this client's RDMA device; `source` of its requests, else the same. Raises
        `VerbsUnavailable` or `ConnectionLost`."""
        self._host, self._key = host, key
        self.source = source or address
        """Where its requests come from."""
        self._device = DirectDevice(load_verbs(provider), address, entries=4)
        self._http = http.client.HTTPConnection(host, port, TIMEOUT_S, source_address=(self.source, 0))
        self._pair: DirectPair | None = None
        self._regions: list[Region] = []
        self._heads: dict[tuple[object, ...], dict[str, str]] = {}
        """Of requests, signed."""
        self._signed_at = 0.0
        self.session = ""
        """Of the RDMA connection, once there is one."""

    def __enter__(self) -> "S3RdmaClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Without a word to the door, which notices by itself."""
        self._http.close()
        self.drop_pair()
        for region in self._regions:
            self._device.domain.deregister(region)
        self._regions.clear()
        self._device.close()

    def register(self, memory: memoryview, access: Access | None = None) -> Region:
        """Let the door read and write this memory."""
        allowed = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        region = self._device.domain.register(memory, allowed if access is None else access)
        self._regions.append(region)
        return region

    def connect(self, as_another: PairEnd | None = None) -> None:
        """Make an RDMA connection, in place of an earlier one. `as_another`: what the door is told in place
        of this client's queue pair. Raises Refused."""
        self.drop_pair()
        access = Access.REMOTE_WRITE | Access.REMOTE_READ
        self._pair = pair = self._device.make_pair(room=1, access=int(access))
        end = as_another or pair.end
        own = {TOKEN: encode_pair(end), PSN: f"{end.psn:06x}"}
        _, answer = self.request("POST", CONTROL.decode() + "connect", own)
        pair.connect(parse_reply(answer[REPLY], answer[PSN]))
        self.session = answer[SESSION]

    def disconnect(self) -> None:
        """Tell the door, too. Raises Refused."""
        self.request("POST", CONTROL.decode() + "disconnect", {SESSION: self.session})
        self.drop_pair()

    def drop_pair(self) -> None:
        """End the RDMA connection without a word to the door."""
        pair, self._pair, self.session = self._pair, None, ""
        if pair is not None:
            pair.close()

    def token(self, region: Region, offset: int = 0, length: int | None = None) -> str:
        """The token for a part of registered memory."""
        size = len(region.view) - offset if length is None else length
        return str(Memory(self.session, region.address + offset, size, region.rkey))

    def get(self, path: str, region: Region, byte_range: str = "") -> int:
        """The object `/BUCKET/KEY` into the beginning of the memory; its length.

        Raises Refused, WrongBytes.
        """
        asked = {TOKEN: self.token(region)} | ({"range": byte_range} if byte_range else {})
        _, answer = self.request("GET", path, asked)
        length = int(answer[BYTES])
        if answer[CRC] != crc_of(region.view[:length]):
            raise WrongBytes(f"{path}: the memory does not have the bytes that the door wrote")
        return length

    def put(self, path: str, region: Region, length: int, query: str = "") -> str:
        """The beginning of the memory as an object; its ETag. Raises Refused, WrongBytes."""
        crc = crc_of(region.view[:length])
        _, answer = self.request("PUT", path, {TOKEN: self.token(region, 0, length), CRC: crc}, query)
        if answer[CRC] != crc:
            raise WrongBytes(f"{path}: the door stored other bytes")
        return answer["etag"]

    def request(
        self, method: str, path: str, headers: Mapping[str, str], query: str = ""
    ) -> tuple[bytes, dict[str, str]]:
        """One signed request without a body; body and headers of the answer. Raises Refused, OSError and
        HTTPException; the next request has a connection of its own then."""
        target = f"{path}?{query}" if query else path
        asked = (method, target, *headers.items())
        now = time.monotonic()
        if len(self._heads) >= HEADS_MAX or now - self._signed_at > HEADS_SECONDS:
            self._heads.clear()
            self._signed_at = now
        if asked not in self._heads:
            own = {"host": self._host, "content-length": "0", **headers}
            self._heads[asked] = signed_headers(self._key, method, target, own)
        try:
            self._http.request(method, target, headers=self._heads[asked])
            answer = self._http.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            # Else the next request would be one too many on a connection that waits for an answer.
            self._http.close()
            raise
        found = {name.lower(): value for name, value in answer.getheaders()}
        if answer.status not in (200, 206):
            raise Refused(answer.status, body.decode("utf-8", "replace"), found)
        return body, found


def signed_headers(key: AccessKey, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request signed now, as an SDK does it: these, all of them signed, and some more."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    together = {"x-amz-date": stamp, "x-amz-content-sha256": UNSIGNED, **headers}
    pairs = [(name.encode(), text.encode()) for name, text in together.items()]
    names = sorted(together)
    canonical = canonical_request(http_request(method.encode(), target.encode(), pairs), names, UNSIGNED)
    signature = signature_of(signing_key(key.secret, stamp[:8], REGION), stamp, scope, canonical)
    together["authorization"] = (
        f"{ALGORITHM} Credential={key.key_id}/{scope},SignedHeaders={';'.join(names)},Signature={signature}"
    )
    return together


def crc_of(data: memoryview) -> str:
    """CRC-64/NVME as S3 writes it."""
    return base64.b64encode(checksums.crc64nvme(data, 0).to_bytes(8, "big")).decode()
