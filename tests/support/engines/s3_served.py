"""The S3 door over blocks in memory, on loopback, and clients of it: boto3, and a socket."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.config

from agent.config.s3_section import S3Section
from agent.fs.files.options import FilesOptions
from agent.host_os.per_user_bounds import Bounds
from agent.inline.secrets import SecretKey
from agent.s3.credentials import AccessKey
from agent.s3.door import S3Door
from agent.s3.rdma.engine import TransferEngine
from agent.s3.requests import http_request
from agent.s3.signature import UNSIGNED, Signer, canonical_request, signature_of, signing_key
from agent.s3.store import ObjectStore
from tests.support.pool.inline_runner import inline_runner
from tests.support.pool.memory_blocks import MemoryBlockStore

KEY = AccessKey("G35TESTONE", SecretKey(b"the secret of the first tenant"), "one")
OTHER_KEY = AccessKey("G35TESTTWO", SecretKey(b"the secret of another tenant"), "two")
EMULATED = "emulator.roce.pyverbs"
CAPACITIES = (65_536, 1 << 20)
SOCKET_SECONDS = 10.0
"""After so long without an answer a socket of a test gives up."""


class Served:
    """A door of two tenants, `one` and `two`, each with a bucket `blocks`."""

    def __init__(
        self, folder: Path, provider: str = EMULATED, enclosures: Sequence[str] = (), **section: Any
    ) -> None:
        self.blocks = {name: MemoryBlockStore(CAPACITIES) for name in ("one", "two")}
        tenants = [
            {"tenant": name, "credentials": "/nonexistent", "buckets": ["blocks"]} for name in self.blocks
        ]
        self.section = S3Section.model_validate(
            {"listen": ["127.0.0.1:0"], "tenants": tenants, "hosts": ["localhost=blocks"], **section}
        )
        options = FilesOptions(staging_bytes=16 << 20, workers=2, cache_seconds=0)
        self.stores = {
            name: ObjectStore(folder / f"{name}.sqlite", folder / f"{name}.files.sqlite", blocks, options)
            for name, blocks in self.blocks.items()
        }
        self.bounds = Bounds()
        self.engine = self._rdma(provider)
        self.door = S3Door(
            self.section, [KEY, OTHER_KEY], self.stores, inline_runner, self.bounds, self.engine,
            lambda: enclosures,
        )  # fmt: skip
        self.door.start()

    def _rdma(self, provider: str) -> TransferEngine | None:
        """A device, with `rdma` among the settings."""
        section = self.section
        if not section.rdma:
            return None
        return TransferEngine(provider, section.rdma, section.transfers, section.rdma_connections)

    @property
    def port(self) -> int:
        return self.door.ports[0]

    def client(self, key: AccessKey = KEY, **options: Any) -> Any:
        scheme = "http" if self.section.certificate is None else "https"
        return boto_client(
            f"{scheme}://127.0.0.1:{self.port}", key.key_id, key.secret.reveal().decode(), **options
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SOCKET_SECONDS)

    def connect_from(self, address: str) -> socket.socket:
        """As another peer: an address of loopback."""
        return socket.create_connection(("127.0.0.1", self.port), SOCKET_SECONDS, (address, 0))


@contextmanager
def served(folder: Path, provider: str = EMULATED, **section: Any) -> Iterator[Served]:
    made = Served(folder, provider, **section)
    try:
        yield made
    finally:
        made.door.stop(0.0)


def boto_client(
    url: str, key_id: str, secret: str, verify: Any = None, region: str = "us-east-1", **settings: Any
) -> Any:
    """boto3's client with path-style addresses; no retries, so that a refusal is seen as it is."""
    settings.setdefault("retries", {"total_max_attempts": 1})
    settings.setdefault("s3", {"addressing_style": "path"})
    return boto3.session.Session().client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        region_name=region,
        verify=verify,
        config=botocore.config.Config(**settings),
    )


def signed_head(
    method: str,
    target: str,
    headers: dict[str, str] | None = None,
    payload: str = UNSIGNED,
    key: AccessKey = KEY,
    region: str = "us-east-1",
    ago: float = 0.0,
) -> tuple[bytes, Signer]:
    """The head of a request as a client of its own making writes it, signed as it stands; and its signer.
    It was signed `ago` seconds ago."""
    signed_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)
    stamp = signed_at.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    together = {
        "host": "127.0.0.1", "x-amz-date": stamp, "x-amz-content-sha256": payload, **(headers or {})
    }  # fmt: skip
    pairs = [(name.encode(), text.encode()) for name, text in together.items()]
    names = sorted(together)
    made = signing_key(key.secret, stamp[:8], region)
    canonical = canonical_request(http_request(method.encode(), target.encode(), pairs), names, payload)
    signature = signature_of(made, stamp, scope, canonical)
    together["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key.key_id}/{scope},"
        f"SignedHeaders={';'.join(names)},Signature={signature}"
    )
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {text}" for name, text in together.items()), "", ""]
    return "\r\n".join(lines).encode(), Signer(key, payload, stamp, scope, signature, made)


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer; a status of 0 where there is none."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        # Not a byte more: the next answer may be there already.
        data = connection.recv(1)
        if not data:
            return 0, head
        head += data
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length, body = int(lengths[0].split(b":")[1]) if lengths else 0, b""
    while len(body) < length and (data := connection.recv(length - len(body))):
        body += data
    return int(head.split()[1]), body
