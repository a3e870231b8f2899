"""CRC-32C, the digest of NVMe/TCP (NVMe/TCP 1.0, 3.3.1.1; the CRC of iSCSI, RFC 3720 appendix B.4).

`awscrt` runs at memory speed and takes any buffer; `crcmod` is the fall-back, and the judge in the tests.
The first CRC loads it: few connections have digests, and awscrt takes 40 to 70 ms of a program's start.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


def _by_crcmod() -> Callable[[Buffer, int], int]:
    import crcmod.predefined

    function = crcmod.predefined.mkPredefinedCrcFun("crc-32c")

    def crc32c_of(data: Buffer, previous: int = 0) -> int:
        # crcmod's "previous value" is 0 at the start for this CRC, exactly as here.
        return int(function(bytes(data), previous))

    return crc32c_of


@functools.cache
def _chosen() -> Callable[[Buffer, int], int]:
    try:
        from awscrt.checksums import crc32c as fast
    except ImportError:
        return _by_crcmod()
    return fast  # type: ignore[no-any-return]


def crc32c(data: Buffer, previous: int = 0) -> int:
    """The CRC of `data`; `previous` is the CRC of the bytes before it (0: none)."""
    return _chosen()(data, previous)
