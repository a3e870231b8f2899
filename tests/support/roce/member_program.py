"""A member of a multicast group in a process of its own: `python roce_member_program.py ADDRESS GROUP`.

It joins the group by the connection manager and says `ready` with the number of its queue pair, and `got ...`
for each datagram. After the word "leave" it leaves the group and says `left`; after "end" it ends.
"""

from __future__ import annotations

import sys

from emulator.roce.pyverbs import cm_enums as ce
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel
from emulator.roce.pyverbs.qp import QPCap, QPInitAttr
from emulator.roce.runtime import registry

GRH = 40


def main() -> None:
    address, group = sys.argv[1:]
    registry.add_device("member", address)
    channel = CMEventChannel()
    cmid = CMID(creator=channel, port_space=ce.RDMA_PS_UDP)
    cmid.resolve_addr(AddrInfo(src=address, dst=group))
    assert CMEvent(channel).event_type == ce.RDMA_CM_EVENT_ADDR_RESOLVED
    cmid.create_qp(QPInitAttr(e.IBV_QPT_UD, cap=QPCap(max_recv_wr=4, max_send_wr=4)))
    memory = cmid.reg_msgs(256)
    cmid.post_recv(memory)
    cmid.join_multicast(AddrInfo(src=group))
    assert CMEvent(channel).event_type == ce.RDMA_CM_EVENT_MULTICAST_JOIN
    print(f"ready {cmid.qpn}", flush=True)
    word = b""
    while word != b"end":
        done = cmid.get_recv_comp()
        assert done is not None
        word = bytes(memory.read(done.byte_len - GRH, GRH))
        print(f"got {word.decode()}", flush=True)
        cmid.post_recv(memory)
        if word == b"leave":
            cmid.leave_multicast(AddrInfo(src=group))
            print("left", flush=True)
    cmid.close()
    channel.close()


if __name__ == "__main__":
    main()
