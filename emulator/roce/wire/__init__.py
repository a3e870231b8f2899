"""RoCEv2 and connection-manager formats as bytes: no I/O, no state.

    flow.py, icrc.py                 addresses and ports; the invariant CRC over them
    opcodes.py, bth.py, extended.py  base and extended transport headers
    packet.py                        one whole packet: from UDP payload to record
    mad.py, cm_*.py                  management datagrams and the connection manager's messages in them

Everything that touches bytes of the network ends in `_untrusted` and raises `MalformedPacket` alone.
"""
