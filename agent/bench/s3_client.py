"""A client of the S3 door that costs little: signed requests by a socket, into one buffer.

    python -m agent.bench.s3_client PORT CREDENTIALS BUCKET OBJECTS

Each line on its standard input asks for one thing in JSON, as agent/bench/pool_client.py has them:

    {"do": "compare"}                  get every object and compare it
    {"do": "get", "seconds": 0.5}      get objects, one at a time
"""

import socket
import sys
from functools import cached_property
from pathlib import Path
from typing import Protocol

from agent.bench.contents import Contents, pages
from agent.bench.pool_client import Work, answer_lines
from agent.bench.rounds import Timed, together
from agent.bench.s3_rdma_client import signed_headers
from agent.errors import G35Error
from agent.s3.credentials import AccessKey, read_credentials_file

VALUE_BYTES = 1 << 20
HEAD_BYTES_MAX = 4096
TIMEOUT_SECONDS = 30.0


class S3Client:
    """One connection, and one request at a time. A head is signed once, and good for 15 minutes."""

    def __init__(self, port: int, key: AccessKey, bucket: str) -> None:
        self._port, self._key, self._bucket = port, key, bucket
        self._room = pages(HEAD_BYTES_MAX + VALUE_BYTES)
        self._heads: dict[tuple[str, str], bytes] = {}

    def close(self) -> None:
        if "_socket" in self.__dict__:
            self._socket.close()

    @cached_property
    def _socket(self) -> socket.socket:
        # With the first request: the door hangs up on a client that shows no key for 10 s.
        made = socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def put(self, name: str, data: memoryview) -> None:
        self._socket.sendall(self._head("PUT", name, len(data)))
        self._socket.sendall(data)
        self._answer()

    def get(self, name: str) -> memoryview:
        """The object's bytes, which the next request overwrites."""
        self._socket.sendall(self._head("GET", name, 0))
        return self._answer()

    def _answer(self) -> memoryview:
        filled, body, end = 0, -1, HEAD_BYTES_MAX
        while filled < end:
            count = self._socket.recv_into(self._room[filled:])
            if not count:
                raise G35Error("the S3 door hung up")
            filled += count
            if body < 0:
                head, separator, _ = bytes(self._room[: min(filled, HEAD_BYTES_MAX)]).partition(b"\r\n\r\n")
                if separator:
                    body = len(head) + len(separator)
                    end = body + _length(head.lower())
        status = bytes(self._room[:15]).split()[1]
        if status != b"200":
            raise G35Error(f"the S3 door answered {bytes(self._room[:filled])[:500]!r}")
        return self._room[body:end]

    def _head(self, method: str, name: str, length: int) -> bytes:
        if (method, name) not in self._heads:
            self._heads[method, name] = self._signed(method, f"/{self._bucket}/{name}", length)
        return self._heads[method, name]

    def _signed(self, method: str, target: str, length: int) -> bytes:
        headers = signed_headers(
            self._key, method, target, {"host": "127.0.0.1", "content-length": str(length)}
        )
        lines = [f"{method} {target} HTTP/1.1", *(f"{each}: {value}" for each, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _length(head: bytes) -> int:
    return int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])


class Getting(Protocol):
    """A client that gets objects by their names."""

    def get(self, name: str) -> memoryview: ...


class Gets(Work):
    """The objects `0` to `count`, of which each holds the contents of its number."""

    def __init__(self, client: Getting, count: int) -> None:
        self._client, self._count = client, count
        self._contents = Contents(VALUE_BYTES)
        self._at, self._got = 0, memoryview(b"")

    def compare(self) -> None:
        for number in range(self._count):
            self._check(number, self._client.get(str(number)))

    def get(self, seconds: float) -> Timed:
        """Get objects for `seconds`; the last one is compared by `compare_last`."""
        return together([self._turn], seconds)

    def _turn(self) -> int:
        self._at = (self._at + 1) % self._count
        self._got = self._client.get(str(self._at))
        return len(self._got)

    def compare_last(self) -> None:
        self._check(self._at, self._got)

    def _check(self, number: int, got: memoryview) -> None:
        if got != self._contents.value(number):
            raise G35Error(f"object {number} is not what was put")


def main() -> None:
    port, credentials, bucket, count = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    client = S3Client(port, read_credentials_file(credentials, "default")[0], bucket)
    answer_lines(Gets(client, count), "s3")
    client.close()


if __name__ == "__main__":
    main()
