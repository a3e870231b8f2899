"""The other end of raw_tcp_*: `python -m agent.bench.raw_tcp_server READY-FILE` writes its port there.

A connection begins with the size of the blocks (8 bytes, little endian); each further 8 bytes ask for one
block. Every block is the same memory: nothing that stores values can be faster.
"""

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

from agent.bench.contents import Contents
from nvmeof.transport.socket_options import set_options

REQUEST_BYTES = 8
BLOCK_BYTES_MAX = 1 << 24


def serve(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        set_options(connection)
        size = int.from_bytes(connection.recv(REQUEST_BYTES, socket.MSG_WAITALL), "little")
        if not 0 < size <= BLOCK_BYTES_MAX:
            return
        block = Contents(size).value(0)
        while len(connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)) == REQUEST_BYTES:
            connection.sendall(block)


def main() -> None:
    ready = Path(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        partial = ready.with_suffix(".part")
        partial.write_text(f"{listener.getsockname()[1]}\n")
        os.replace(partial, ready)
        while True:
            connection, _peer = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
