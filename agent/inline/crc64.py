"""CRC-64/NVME (NVM Command Set Specification 1.0c, 5.2.1.3.4: polynomial AD93D23594C93659, reflected).

The fast engine is awscrt's, which runs at memory speed and releases the GIL. crcmod computes the same
polynomial by an independent hand: it is the judge in the tests, and the fall-back where awscrt has no
wheel. Which one is in use is `engine()`. It is loaded by the first CRC: awscrt takes 40 to 70 ms of each
program's start, and AES-GCM needs none.
"""

import functools
from collections.abc import Callable
from typing import Final, cast

import crcmod

from agent.inline.scatter import Buffer

_POLYNOMIAL: Final = 0x1_AD93_D235_94C9_3659
_reference = crcmod.mkCrcFun(_POLYNOMIAL, initCrc=0, rev=True, xorOut=0xFFFF_FFFF_FFFF_FFFF)


def crc64_reference(data: Buffer, previous: int = 0) -> int:
    """The same value as `crc64`, by crcmod: slow, and independent."""
    return cast(int, _reference(bytes(data), previous))


@functools.cache
def _found() -> tuple[str, Callable[[Buffer, int], int]]:
    try:
        from awscrt.checksums import crc64nvme
    except ImportError:
        return "crcmod", crc64_reference
    return "awscrt", cast("Callable[[Buffer, int], int]", crc64nvme)


def engine() -> str:
    """The library that computes: `awscrt` or `crcmod`."""
    return _found()[0]


def crc64(data: Buffer, previous: int = 0) -> int:
    """CRC-64/NVME of `data`, continuing from `previous` (the CRC of the bytes before; 0 at the start)."""
    return _found()[1](data, previous)
