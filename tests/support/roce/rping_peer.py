"""rping's protocol, of librdmacm's examples, for a CMID of the emulator's pyverbs: both its sides.

One round: the client tells in 16 bytes (address u64, key u32, length u32, big-endian) where its text lies;
the server READs it there and answers with any message; the client tells where it wants the text back; the
server WRITEs it there, and answers again. The client compares.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Final

from emulator.roce.pyverbs.cm_enums import RAI_PASSIVE, RDMA_PS_TCP
from emulator.roce.pyverbs.cmid import CMID, AddrInfo
from emulator.roce.pyverbs.cq import WC
from emulator.roce.pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
)
from emulator.roce.pyverbs.mr import MR
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.pyverbs.qp import QPCap, QPInitAttr

INFO: Final = struct.Struct(">QII")
ACCESS: Final = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE


def _queue_pair() -> QPInitAttr:
    return QPInitAttr(
        qp_type=IBV_QPT_RC, cap=QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    )


class _Peer:
    """A CMID with a queue pair of its own, one buffer for the text and one for each way of the words."""

    def __init__(self, cmid: CMID, size: int) -> None:
        self.cmid = cmid
        self.size = size
        domain = cmid.domain_holder()
        self.text = MR(domain, size, ACCESS)
        self.said = MR(domain, INFO.size, ACCESS)
        self.heard = MR(domain, INFO.size, ACCESS)
        cmid.post_recv(self.heard, INFO.size)

    def say(self, address: int, key: int, length: int) -> None:
        self.said.write(INFO.pack(address, key, length), INFO.size)
        self.cmid.post_send(self.said, IBV_SEND_SIGNALED, INFO.size)
        self.sent()

    def hear(self) -> tuple[int, int, int]:
        """What the peer says next."""
        self._check(self.cmid.get_recv_comp())
        heard = INFO.unpack(self.heard.read(INFO.size, 0))
        self.cmid.post_recv(self.heard, INFO.size)
        return heard

    def sent(self) -> None:
        self._check(self.cmid.get_send_comp())

    @staticmethod
    def _check(completion: WC | None) -> None:
        if completion is None or completion.status:
            raise ConnectionError(str(completion))

    def close(self) -> None:
        with contextlib.suppress(PyverbsRDMAError):
            self.cmid.disconnect()
        self.cmid.close()


class RpingServer:
    """Listens from its making on; `serve` takes one client."""

    def __init__(self, address: str, port: int) -> None:
        where = AddrInfo(src=address, src_service=str(port), port_space=RDMA_PS_TCP, flags=RAI_PASSIVE)
        self._listening = CMID(creator=where, qp_init_attr=_queue_pair())
        self._listening.listen(1)

    def serve(self, size: int, rounds: int, leaves: Callable[[], object]) -> list[bytes]:
        """One client, for so many rounds; the texts that it had. `leaves` waits for its end.

        As rping's server does: its client takes a connection that ends amid its last words for a failure,
        where it sees the end before the words.
        """
        request = self._listening.get_request()
        peer = _Peer(request, size)
        try:
            request.accept()
            texts = []
            for _ in range(rounds):
                texts.append(self._until_last_words(peer))
                # rxe completes a receive before it acknowledges it, and the client leaves with the last one.
                # Whether it had these words is for its exit code to say.
                is_last = len(texts) == rounds
                with contextlib.suppress(ConnectionError) if is_last else contextlib.nullcontext():
                    peer.say(0, 0, 0)
            leaves()
            return texts
        finally:
            peer.close()

    @staticmethod
    def _until_last_words(peer: _Peer) -> bytes:
        """A round but for the second answer; the client's text."""
        address, key, length = peer.hear()
        peer.cmid.post_read(peer.text, length, address, key, IBV_SEND_SIGNALED)
        peer.sent()
        text = peer.text.read(length, 0)
        peer.say(0, 0, 0)
        address, key, length = peer.hear()
        peer.cmid.post_write(peer.text, length, address, key, IBV_SEND_SIGNALED)
        peer.sent()
        return text

    def close(self) -> None:
        self._listening.close()


def rping_client(source: str, address: str, port: int, texts: list[bytes]) -> list[bytes]:
    """Have a server read each text and write it back; what it wrote."""
    where = AddrInfo(src=source, dst=address, dst_service=str(port), port_space=RDMA_PS_TCP)
    cmid = CMID(creator=where, qp_init_attr=_queue_pair())
    peer = _Peer(cmid, max(map(len, texts)))
    try:
        cmid.connect()
        back = MR(cmid.domain_holder(), peer.size, ACCESS)
        returned = []
        for text in texts:
            peer.text.write(text, len(text))
            peer.say(peer.text.buf, peer.text.rkey, len(text))
            peer.hear()
            peer.say(back.buf, back.rkey, len(text))
            peer.hear()
            returned.append(back.read(len(text), 0))
        return returned
    finally:
        peer.close()
