"""The connection manager (IBTA volume 1, chapter 12) with the RDMA IP CM service (annex A11), without I/O.

limits.py      every bound and time
events.py      what it tells its users: rdma_cm's events
states.py      the life of a connection as a table
connection.py  one connection: calls and messages in, messages and events out
manager.py     all connections of one NIC: tables, listeners, timers
attributes.py  what a queue pair is to be set to (rdma_init_qp_attr)
gsi.py         its messages through queue pair 1 of a `Nic`
"""
