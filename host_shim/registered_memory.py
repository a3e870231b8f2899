"""Memory that an agent on this machine maps too, and transfers of values between it and the pool.

Read transfer_wire.py first. Where the agent cannot map it, it is ordinary memory.
"""

import bisect
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from host_shim.control_wire import MalformedControl, Outcome, outcomes
from host_shim.many_values import cut
from host_shim.session_files import Refusal, is_own, raise_refusal
from host_shim.transfer_wire import (
    PARTS_MAX,
    SET_LOCK,
    SET_LOCK_WAITING,
    TOGETHER_BYTES,
    Ioctl,
    Part,
    decode_done_many_untrusted,
    decode_done_untrusted,
    decode_registered_untrusted,
    encode_lock,
    encode_many,
    encode_register,
    encode_transfer,
    ioctl_command,
)
from host_shim.unlocked_memory import new_memory

MEMFDS_MAX: Final = 64
"""Of one pool: each takes a descriptor, and a session registers no more."""
_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL: Final = 0x0001
_F_SEAL_SHRINK: Final = 0x0002
_F_SEAL_GROW: Final = 0x0004
_MADV_POPULATE_WRITE: Final = 23
_TOUCHED_AT_A_TIME: Final = 16 << 20
_SCRAP_BYTES: Final = 64 << 10
_ASIDE_MAX: Final = 8
"""Pieces of `TOGETHER_BYTES` for values that go to other memory, of one pool."""
NO_ANSWER: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ETIMEDOUT, errno.ENODEV})
"""How the kernel ends a call that the agent may still be working on."""
_HIT: Final = Outcome.HIT.value
_OUTCOMES: Final = {each.value: each for each in Outcome}


class Registrable:
    """One memfd, mapped here for as long as anybody has a view of it."""

    descriptor = -1

    def __init__(self, size: int) -> None:
        """`size` bytes, rounded up to whole pages. Raises Refusal, ENOMEM where there is no such room."""
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.descriptor = os.memfd_create("g35", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, self.size)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            mapped = mmap.mmap(self.descriptor, self.size)
            _touch(self.descriptor, mapped)
        except OSError as error:
            raise_refusal(error)
            raise
        self.view = memoryview(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.may_be_in_use = False
        """A call has ended here, by an exception, and an agent may still work on the memory."""

    def __del__(self) -> None:
        """The descriptor goes with the last call that may wait for the agent; the mapping, with its last
        use."""
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def wait_for(self, locked_byte: int) -> None:
        """Return when the agent that locked the byte is gone, or has stopped to use the memory."""
        fcntl.fcntl(self.descriptor, SET_LOCK_WAITING, encode_lock(fcntl.F_WRLCK, locked_byte))
        fcntl.fcntl(self.descriptor, SET_LOCK, encode_lock(fcntl.F_UNLCK, locked_byte))


def _touch(descriptor: int, mapped: mmap.mmap) -> None:
    """Have every page there, which the agent asks for, without the interpreter's lock."""
    try:
        mapped.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if not is_own(error):
            raise
        # Before Linux 5.14.
        zeroes = bytes(min(len(mapped), _TOUCHED_AT_A_TIME))
        for at in range(0, len(mapped), len(zeroes)):
            os.pwrite(descriptor, zeroes[: len(mapped) - at], at)


Place: TypeAlias = tuple[Registrable, int, int]
"""Where a buffer lies in registered memory: which, offset, length. It is made for every get."""


class Aside:
    """Memory for one request's values that go to other memory. Who is done with it says so by `is_lent`."""

    __slots__ = ("is_known", "is_lent", "memory", "view")

    def __init__(self, memory: Registrable) -> None:
        self.memory = memory
        self.view = memory.view[:TOGETHER_BYTES]
        self.is_lent = True
        self.is_known = False
        """Among the memory that the agent is told of."""


class RegisteredMemory:
    """All of one pool. Safe from any thread; looking a buffer up takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: tuple[tuple[int, ...], tuple[Registrable, ...]] = ((), ())
        self._scrap = memoryview(b"")
        self._asides: list[Aside] = []

    def new(self, size: int) -> memoryview:
        """`size` zero bytes that begin at a page, with every page there. Beyond `MEMFDS_MAX`: ordinary
        memory."""
        if size <= 0:
            raise ValueError(f"{size} bytes of memory")
        made = self._made(size)
        if made is None:
            return new_memory(size)
        try:
            with self._lock:
                self._note(made)
            return made.view[:size]
        except BaseException:  # an interrupt: nobody would ever have it
            with self._lock:
                self._forget(made)
            raise

    def _made(self, size: int) -> Registrable | None:
        if len(self._by_address[1]) >= MEMFDS_MAX:
            return None
        try:
            return Registrable(size)
        except Refusal:
            return None

    def _note(self, memory: Registrable) -> None:
        """The agent may be told of it from now on. The caller has the lock, here and in `_forget`."""
        known = sorted({*self._by_address[1], memory}, key=lambda each: each.address)
        self._by_address = (tuple(each.address for each in known), tuple(known))

    def _forget(self, memory: Registrable) -> None:
        known = [each for each in self._by_address[1] if each is not memory]
        self._by_address = (tuple(each.address for each in known), tuple(known))

    def small(self, size: int) -> memoryview:
        """A buffer of a few bytes, cut from memory that others of them share. It is never given back."""
        with self._lock:
            scrap = self._scrap
        if len(scrap) < size:
            scrap = self.new(max(size, _SCRAP_BYTES))
        with self._lock:
            self._scrap = scrap[size:]
        return scrap[:size]

    def borrow_aside(self) -> Aside | None:
        """Registered memory for one request; None where all of it is in use, or there is none.

        Its borrower sets `is_lent`: False, which no interrupt can come amid, or True for good where an agent
        may still touch it. Such memory is let go, and another may be made.
        """
        lent: Aside | None = None
        try:
            with self._lock:
                for each in self._asides:
                    if each.memory.may_be_in_use:
                        self._forget(each.memory)
                        self._asides = [other for other in self._asides if other is not each]
                    elif lent is None and not each.is_lent:
                        lent = each
                        lent.is_lent = True
                if lent is None and len(self._asides) < _ASIDE_MAX:
                    made = self._made(TOGETHER_BYTES)
                    if made is not None:
                        lent = Aside(made)
                        self._asides.append(lent)
                if lent is not None and not lent.is_known:
                    self._note(lent.memory)
                    lent.is_known = True
            return lent
        except BaseException:
            if lent is not None:
                lent.is_lent = False
            raise

    def find(self, buffer: memoryview) -> Place | None:
        """Where it lies; None for any other memory. `buffer` is contiguous."""
        addresses, known = self._by_address
        length = buffer.nbytes
        if not addresses or not length or buffer.readonly:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        at = bisect.bisect_right(addresses, address) - 1
        if at < 0 or address + length > addresses[at] + known[at].size:
            return None
        return known[at], address - addresses[at], length

    def after_fork_in_child(self) -> None:
        """The memory is shared with the parent; its lock is not, and what calls there have in use is lost."""
        self._lock = threading.Lock()
        self._asides = []

    def close(self) -> None:
        """Nothing is registered any more; buffers stay what they are."""
        with self._lock:
            self._by_address = ((), ())


class Transfers:
    """Of one session. Safe from several threads at once."""

    def __init__(
        self,
        ioctl: Callable[[int, int, bytearray], None],
        memory: RegisteredMemory,
        *,
        ends_before_it_raises: bool = True,
    ) -> None:
        """`ioctl` of a descriptor and a command: what the agent answers comes back in the bytes.
        `ends_before_it_raises`: as of a system call, whatever is raised (`Files.ENDS_BEFORE_IT_RAISES`)."""
        self._ioctl = ioctl
        self._ends_before_it_raises = ends_before_it_raises
        self._memory = memory
        self._lock = threading.Lock()
        self._numbers: dict[Registrable, tuple[int, int] | None] = {}
        """Number in this session and locked byte of what was registered; None where the agent refused."""

    def move(
        self,
        descriptor: int,
        which: Ioctl,
        buffers: Sequence[memoryview],
        volume: str,
        key: bytes,
        ticket: int | None,
        ttl_seconds: int = 0,
    ) -> int | None:
        """LOAD or STORE a value of registered memory: its length, 0 for a miss.

        None where a buffer is other memory, or the agent does not map it, or they are too many. Raises the
        OSError of the call, and MalformedControl. In no case does the agent touch the memory afterwards.
        """
        if len(buffers) > PARTS_MAX:
            return None
        places = self._places(buffers)
        parts = self._parts(descriptor, places)
        if not parts:
            return None
        data = encode_transfer(volume, key, ticket, parts, ttl_seconds)
        self._call(descriptor, which, data, places)
        outcome, moved = decode_done_untrusted(data)
        if outcome == _HIT:
            return moved
        outcomes((outcome,))  # raises MalformedControl for what is none
        return 0

    def move_many(
        self,
        descriptor: int,
        which: Ioctl,
        volume: str,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        ttl_seconds: int = 0,
    ) -> list[tuple[Outcome, int]] | None:
        """LOAD_MANY or STORE_MANY of one of `groups_of`: outcome and length of each value. None and raises as
        `move`."""
        if places := self._places(views):
            return self._move_many(descriptor, which, volume, keys, places, ttl_seconds)
        aside = self._memory.borrow_aside()
        if aside is None:
            return None
        try:
            pieces = cut(aside.view, views)
            if which is Ioctl.STORE_MANY:
                pieces = [piece[: len(view)] for piece, view in zip(pieces, views, strict=True)]
                for piece, view in zip(pieces, views, strict=True):
                    piece[:] = view
            places = self._places(pieces)
            done = self._move_many(descriptor, which, volume, keys, places, ttl_seconds)
            if which is Ioctl.LOAD_MANY:
                for (outcome, length), view, piece in zip(done or (), views, pieces, strict=False):
                    if outcome is Outcome.HIT:
                        come = min(length, len(view))
                        view[:come] = piece[:come]
            return done
        finally:
            aside.is_lent = aside.memory.may_be_in_use

    def _move_many(
        self,
        descriptor: int,
        which: Ioctl,
        volume: str,
        keys: Sequence[bytes],
        places: Sequence[Place],
        ttl_seconds: int,
    ) -> list[tuple[Outcome, int]] | None:
        parts = self._parts(descriptor, places)
        if not parts:
            return None
        data = encode_many(volume, keys, parts, ttl_seconds)
        self._call(descriptor, which, data, places)
        done = decode_done_many_untrusted(data, len(keys))
        try:
            return [(_OUTCOMES[outcome], length) for outcome, length in done]
        except KeyError as unknown:
            raise MalformedControl(f"{unknown} is no outcome") from None

    def _places(self, buffers: Sequence[memoryview]) -> list[Place]:
        """Where they all lie in registered memory; nothing where one of them does not."""
        places: list[Place] = []
        for buffer in buffers:
            place = self._memory.find(buffer)
            if place is None:
                return []
            places.append(place)
        return places

    def _parts(self, descriptor: int, places: Sequence[Place]) -> list[Part]:
        """The same as the agent knows it; nothing where it has not mapped one of them."""
        parts: list[Part] = []
        last: Registrable | None = None
        number: int | None = None
        for memory, offset, length in places:
            if memory is not last:
                last, number = memory, self._number(descriptor, memory)
            if number is None:
                return []
            parts.append((number, offset, length))
        return parts

    def _number(self, descriptor: int, memory: Registrable) -> int | None:
        try:
            known = self._numbers[memory]
        except KeyError:
            with self._lock:
                if memory not in self._numbers:
                    self._numbers[memory] = self._register(descriptor, memory)
                known = self._numbers[memory]
        return None if known is None else known[0]

    def _register(self, descriptor: int, memory: Registrable) -> tuple[int, int] | None:
        data = encode_register(memory.descriptor, memory.size)
        try:
            self._call(descriptor, Ioctl.REGISTER, data, ())
            return decode_registered_untrusted(data)
        except (Refusal, MalformedControl):
            return None

    def _call(self, descriptor: int, which: Ioctl, data: bytearray, places: Sequence[Place]) -> None:
        has_ended = self._ends_before_it_raises
        try:
            self._ioctl(descriptor, ioctl_command(which, len(data)), data)
            has_ended = True
        except Refusal as error:
            has_ended = error.errno not in NO_ANSWER
            if not has_ended:
                for memory, _, _ in places:
                    known = self._numbers.get(memory)
                    if known is not None:
                        memory.wait_for(known[1])
                has_ended = True
            raise
        finally:
            if not has_ended:
                for memory, _, _ in places:
                    memory.may_be_in_use = True
