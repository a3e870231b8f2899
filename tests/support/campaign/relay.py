"""A relay between an agent and an enclosure that knows NVMe/TCP's PDUs, and does to them what it is told.

    python -m tests.support.campaign.relay --listen 4500 --to 4420 --control relay.sock --seed 35

says `{"port": 4500}` and relays. Over its control socket (the lines of `emulator/jbof/control_client.py`)
`set` gives a probability a PDU for each kind of fault, no fault being named means that it relays cleanly;
`stats` says how often it did what. What happens to the n-th PDU of a direction of the n-th connection follows
from the seed alone.

A stream of TCP loses, repeats and swaps nothing. A middle box that ends one connection and begins another
does, and so does a peer with a bug: this is both. A connection that was stalled stays silent when the weather
is good again, as one does that a firewall has forgotten. With `--spare-writes` the enclosure gets no
other bytes than the host sent: what it took for a write, without digests, could be anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

FAULTS = (
    "reset", "delay", "duplicate", "flip", "drop", "reorder", "truncate", "stall", "half_close",
    "late_connect",
)  # fmt: skip
"""`late_connect` is drawn once for a connection, the others for each PDU."""
HARMLESS = ("reset", "delay", "stall", "half_close")
"""Of these the bytes that arrive are those that were sent."""
DELAY_SECONDS = 0.3
LATE_CONNECT_SECONDS = 3.0
REORDER_SECONDS = 0.05
"""For so long at the most a PDU waits for another that goes first."""
PDU_BYTES_MAX = 4 << 20
HEADER_BYTES = 80
"""Where half of the flips go: a command, an answer and a header digest lie in so many bytes."""

_COMMON = struct.Struct("<BBBBI")
_RESET = struct.pack("@ii", 1, 0)


class Broken(Exception):
    """This direction of a connection carries nothing more."""


class Weather:
    """What happens to PDUs just now, and what has happened."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def draw(self, dice: random.Random, kinds: tuple[str, ...]) -> str | None:
        """A fault, or None. Takes as many numbers from the dice whatever the rates are."""
        rates = self.rates
        drawn = [kind for kind in kinds if dice.random() < rates.get(kind, 0.0)]
        if not drawn:
            return None
        with self._lock:
            self.counts[drawn[0]] += 1
        return drawn[0]


class Direction(threading.Thread):
    """One direction of one connection: PDUs from `source` to `sink`."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, weather: Weather, seed: str, kinds: tuple[str, ...]
    ) -> None:
        super().__init__(name=f"relay {seed}", daemon=True)
        self._kinds = kinds
        self._source, self._sink = source, sink
        self._weather = weather
        self._dice = random.Random(seed)
        self._held: bytes | None = None
        self._silent = False

    def run(self) -> None:
        try:
            while pdu := self._next_pdu():
                self._pass_on(pdu)
            self._send(b"")
            self._sink.shutdown(socket.SHUT_WR)
        except (Broken, OSError):
            for end in (self._source, self._sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, pdu: bytes) -> None:
        fault = self._weather.draw(self._dice, self._kinds)
        match fault:
            case _ if self._silent:
                return
            case "reset":
                for end in (self._source, self._sink):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                raise Broken
            case "delay":
                time.sleep(self._dice.uniform(0, DELAY_SECONDS))
                self._send(pdu)
            case "duplicate":
                self._send(pdu + pdu)
            case "flip":
                self._send(self._flipped(pdu))
            case "drop":
                return
            case "reorder" if self._held is None:
                self._held = pdu
            case "truncate":
                self._send(pdu[: self._dice.randrange(len(pdu))])
            case "stall":
                self._silent = True
            case "half_close":
                self._send(b"")
                self._sink.shutdown(socket.SHUT_WR)
                self._silent = True
            case _:
                self._send(pdu)

    def _flipped(self, pdu: bytes) -> bytes:
        flipped = bytearray(pdu)
        reach = min(len(pdu), HEADER_BYTES) if self._dice.random() < 0.5 else len(pdu)
        bit = self._dice.randrange(8 * reach)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    def _send(self, data: bytes) -> None:
        """Send, and behind it what was held back."""
        held, self._held = self._held, None
        if not self._silent:
            self._sink.sendall(data + (held or b""))

    def _next_pdu(self) -> bytes:
        """The next PDU; nothing at the end of the stream, and whatever is left where that breaks off."""
        head = self._take(_COMMON.size)
        if len(head) < _COMMON.size:
            return head
        length = _COMMON.unpack(head)[4]
        if not _COMMON.size <= length <= PDU_BYTES_MAX:
            raise Broken
        return head + self._take(length - _COMMON.size)

    def _take(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            if self._held is not None:
                self._source.settimeout(REORDER_SECONDS)
            try:
                part = self._source.recv(min(left, 1 << 18))
            except TimeoutError:
                self._send(b"")
                continue
            finally:
                self._source.settimeout(None)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class Relay:
    """Listens at one port of loopback and connects to another."""

    def __init__(self, listen: int, to: int, seed: int, *, spare_writes: bool = False) -> None:
        self.weather = Weather()
        self._to, self._seed = to, seed
        self._out = HARMLESS if spare_writes else FAULTS[:-1]
        self._connections = 0
        self._socket = socket.create_server(("127.0.0.1", listen), backlog=128)
        self.port: int = self._socket.getsockname()[1]

    def serve(self) -> None:
        """Until the process ends."""
        while True:
            sock, _ = self._socket.accept()
            self._connections += 1
            threading.Thread(target=self._connect, args=(sock, self._connections), daemon=True).start()

    def _connect(self, sock: socket.socket, number: int) -> None:
        seed = f"{self._seed} {self._to} {number}"
        if self.weather.draw(random.Random(seed), ("late_connect",)):
            time.sleep(LATE_CONNECT_SECONDS)
        try:
            onward = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:
            sock.close()
            return
        for end in (sock, onward):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = Direction(sock, onward, self.weather, f"{seed} out", self._out)
        back = Direction(onward, sock, self.weather, f"{seed} in", FAULTS[:-1])
        there.start()
        back.start()
        there.join()
        back.join()
        sock.close()
        onward.close()

    def control(self, listener: socket.socket) -> None:
        """Answer `set` and `stats`, one request a connection, until the process ends."""
        with listener:
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError, ValueError):
                    client.settimeout(5)
                    with client.makefile("rb") as lines:
                        answer = self._answer(json.loads(lines.readline(1 << 16)))
                    client.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.pop("verb", None):
            case "set" if request.keys() <= set(FAULTS):
                self.weather.rates = {kind: float(rate) for kind, rate in request.items()}
                return {"ok": True}
            case "stats":
                return {"ok": True, "counts": dict(self.weather.counts), "connections": self._connections}
            case _:
                return {"ok": False, "error": f"set, with {', '.join(FAULTS)}; or stats"}


def main(words: list[str] | None = None) -> int:
    """The entry point of `python -m tests.support.campaign.relay`."""
    parser = argparse.ArgumentParser(description="Relay NVMe/TCP on loopback, with faults.")
    parser.add_argument("--listen", type=int, default=0, help="port; 0: any that is free")
    parser.add_argument("--to", type=int, required=True, help="port of the enclosure")
    parser.add_argument("--control", type=Path, required=True, help="path of its control socket")
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument(
        "--spare-writes", action="store_true", help="towards the enclosure no byte is changed"
    )
    chosen = parser.parse_args(words)
    relay = Relay(chosen.listen, chosen.to, chosen.seed, spare_writes=chosen.spare_writes)
    # Before `port` is told: who reads that may ask at once.
    chosen.control.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(chosen.control))
    listener.listen(8)
    threading.Thread(target=relay.control, args=(listener,), daemon=True).start()
    print(json.dumps({"port": relay.port, "pid": os.getpid()}), flush=True)
    relay.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
