"""A program on an emulated device in a process of its own: `python roce_peer_program.py ADDRESS [PCAP]`.

It accepts one connection, lets its memory be read and written, answers each SEND with one of the same bytes,
and says on standard output what happens: `ready`, `connected`, each message as `got N`, `disconnected`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from emulator.roce.cm.events import CmEventType
from emulator.roce.nic.verbs import SendOpcode, WcOpcode, WcStatus
from tests.support.roce.devices import Program

SLOT = 4096
SLOTS = 16


def main() -> None:
    pcap = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    program = Program(sys.argv[1], pcap=pcap)
    try:
        program.memory[:] = bytes(range(256)) * (len(program.memory) // 256)
        program.listen()
        print("ready", flush=True)
        for slot in range(SLOTS):
            program.memory[slot * SLOT] = slot
        program.accept()
        for slot in range(SLOTS):
            program.post_receive(slot * SLOT, SLOT, wr_id=slot)
        program.event(CmEventType.ESTABLISHED)
        print("connected", flush=True)
        while not program.events:
            program.device.drive_until(lambda: len(program.cq) or program.events, None)
            with program.device.turn():
                completions = program.cq.poll(SLOTS)
            for done in completions:
                if done.status is not WcStatus.SUCCESS:
                    print(f"failed {done.status.name}", flush=True)
                elif done.opcode is WcOpcode.RECV:
                    print(f"got {done.byte_len}", flush=True)
                    program.post(SendOpcode.SEND, done.wr_id * SLOT, done.byte_len, wr_id=done.wr_id)
                else:
                    program.post_receive(done.wr_id * SLOT, SLOT, wr_id=done.wr_id)
        program.event(CmEventType.DISCONNECTED)
        print("disconnected", flush=True)
    finally:
        program.close()


if __name__ == "__main__":
    main()
