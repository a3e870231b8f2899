"""In-band authentication, DH-HMAC-CHAP (TP8006, now in NVMe Base 2.0): secrets, arithmetic, both sides.

Read `secret.py`, then `host_side.py` and `controller_side.py`. The messages are in
`nvmeof/wire/authentication.py`. Only `secret_files.py` and `private_files.py` touch
the file system.
"""
