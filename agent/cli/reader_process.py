"""The process of a reader (agent/service/reader.py), as the agent starts it: no verb for a person."""

import argparse
import contextlib
import functools
import logging
import os
import signal
import socket
import sys

from agent.cli.trio_run import run_unwrapped
from agent.errors import G35Error
from agent.host_os.parent_death import die_with_parent
from agent.host_os.private_memory import keep_memory_private
from agent.pool.volume.set_versions import SetVersions
from agent.service.reader import serve_reads
from agent.service.reader_link import Lines, LinkBroken, Links, decode_order


def main() -> int:
    """0: it was told to stop, or its mount has gone; 1: it cannot serve, and has said why."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("link", "fuse", "versions", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--slots", default="")
    parser.add_argument("--s3", default="")
    parser.add_argument("--guests", default="")
    parser.add_argument("--log-level", type=int, default=logging.WARNING)
    given = parser.parse_args()
    die_with_parent()
    for ending in (signal.SIGINT, signal.SIGTERM):  # they may come to all processes of the agent at once
        signal.signal(ending, signal.SIG_IGN)
    if os.getppid() != given.parent:
        return 0  # it had died before
    logging.basicConfig(
        level=given.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    keep_memory_private()
    versions = SetVersions(given.versions, is_writer=False)
    os.close(given.versions)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.socket(fileno=given.link))
        slots, s3, guests = (
            [stack.enter_context(socket.socket(fileno=int(each))) for each in some.split(",") if each]
            for some in (given.slots, given.s3, given.guests)
        )
        lines = Lines()
        try:
            order = decode_order(_first(lines, link))
            hear = functools.partial(_until_closed, lines, link)
            links = Links(link, slots, s3, guests)
            run_unwrapped(functools.partial(serve_reads, order, given.fuse, versions, links, hear))
        except LinkBroken:
            return 0
        except G35Error as error:
            logging.getLogger(__name__).error("%s: %s", error, error.advice)
            return 1
    return 0


def _first(lines: Lines, link: socket.socket) -> bytes:
    while True:
        for line in lines.receive(link):
            return line


def _until_closed(lines: Lines, link: socket.socket) -> None:
    while True:
        try:
            for _ in lines.receive(link):
                pass
        except (LinkBroken, OSError):
            return


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a worker may hang in an operation of an enclosure that does not answer
