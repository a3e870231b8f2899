"""The answers by a reader are those of the first process alone, whatever bytes come in whatever pieces."""

from __future__ import annotations

import contextlib
import html
import random
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.engines.s3_served import KEY, OTHER_KEY, answer_of, signed_head
from tests.support.engines.s3_streams import KEYS, answers_to, in_pieces, stream
from tests.support.engines.s3_with_reader import WithReader, with_reader
from tests.support.waiting import wait_until
from tests.system.s3.test_s3_tls import make_certificate

SEEDS = range(12)
BODIES = {key: random.Random(key).randbytes(1_300_000 if key == "c" else 3000) for key in KEYS}

Connect = Callable[[int], socket.socket]


@pytest.fixture(params=["plain", "TLS"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[WithReader, Connect]]:
    """The doors, and what connects to a port."""

    def plain(port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 60)

    if request.param == "plain":
        with with_reader(tmp_path) as near:
            yield near, plain
        return
    certificate, private = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    files = {"certificate": str(certificate), "private_key": str(private)}
    with with_reader(tmp_path, **files) as near:
        yield near, lambda port: context.wrap_socket(plain(port), server_hostname="127.0.0.1")


def begin_anew(near: WithReader, connect: Connect) -> None:
    """All objects are as before the first stream."""
    with connect(near.door.ports[0]) as connection:
        for key in (KEY, OTHER_KEY):
            connection.sendall(signed_head("GET", "/blocks?list-type=2", key=key)[0])
            listed = answer_of(connection)[1]
            for name in re.findall(r"<Key>([^<]*)</Key>", listed.decode()):
                connection.sendall(signed_head("DELETE", "/blocks/" + quote(html.unescape(name)), key=key)[0])
                assert answer_of(connection)[0] == 204
        for name, body in BODIES.items():
            head, _ = signed_head("PUT", "/blocks/" + name, {"content-length": str(len(body))})
            connection.sendall(head + body)
            assert answer_of(connection)[0] == 200


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_answers_as_the_first_process_alone(both: tuple[WithReader, Connect], seed: int) -> None:
    near, connect = both
    chance = random.Random(seed)
    data = stream(chance)
    pieces = in_pieces(chance, data)
    found = []
    for port in (near.door.ports[0], near.port):
        begin_anew(near, connect)
        with contextlib.closing(connect(port)) as connection:
            found.append(answers_to(connection, pieces))
    assert found[0] == found[1], data[:3000]
    wait_until(lambda: near.held() == near.door.counters.connections == near.reader.counters.connections == 0)
