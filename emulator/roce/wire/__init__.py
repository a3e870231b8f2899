"""RoCEv2 and connection-manager formats as bytes: no I/O, no state.

    flow.py, icrc.py                 who talks to whom; the invariant CRC over it
    opcodes.py, bth.py, extended.py  base and extended transport headers
    packet.py                        one whole packet: record <-> UDP payload
    mad.py, cm_*.py                  management datagrams and the connection manager's messages in them
    pcap.py                          captures that Wireshark reads

Everything that touches bytes of the network ends in `_untrusted` and raises `MalformedPacket` alone.
"""
