"""The messages of a vhost-user front-end so far, for replay to another back-end.

The only I/O reads a ring's used index in the guest's memory. The order of replay is QEMU's for a device that
it does reconnect (vhost-user-blk).
"""

import mmap
import os
import struct
from collections.abc import Iterator

from emulator.lab import vhost_messages as vhost

_USED_INDEX = struct.Struct("<2xH")
"""A used ring begins with flags and index, 16 bits each (virtio 1.1, 2.6.8)."""
_REGION_AT = 8
"""In SET_MEM_TABLE a count and padding come first; in ADD_MEM_REG padding."""

_ONCE = (
    vhost.Request.SET_PROTOCOL_FEATURES,
    vhost.Request.SET_OWNER,
    vhost.Request.SET_FEATURES,
    vhost.Request.SET_INFLIGHT_FD,
    vhost.Request.SET_BACKEND_REQ_FD,
    vhost.Request.SET_MEM_TABLE,
)
"""Of the whole device, in the order of replay."""
_OF_A_RING = (
    vhost.Request.SET_VRING_NUM,
    vhost.Request.SET_VRING_BASE,
    vhost.Request.SET_VRING_ADDR,
    vhost.Request.SET_VRING_CALL,
    vhost.Request.SET_VRING_ERR,
    vhost.Request.SET_VRING_KICK,
    vhost.Request.SET_VRING_ENABLE,
)
_ENDED_BY_A_STOP = (vhost.Request.SET_VRING_BASE, vhost.Request.SET_VRING_ADDR, vhost.Request.SET_VRING_KICK)
"""QEMU sends these again before a stopped ring starts; CALL and ERR stay."""


class DeviceSetup:
    """The last message of each kind. Owns the descriptors of kept messages."""

    def __init__(self) -> None:
        self._once: dict[int, vhost.Message] = {}
        self._rings: dict[int, dict[int, vhost.Message]] = {}
        self._regions: dict[int, vhost.Message] = {}
        self._answers: dict[int, bytes] = {}

    def keep(self, message: vhost.Message) -> None:
        """Keep a message of the front-end with its descriptors, or close them."""
        request = message.request
        if request in _ONCE:
            self._replace(self._once, request, message)
        elif request in _OF_A_RING:
            self._replace(self._rings.setdefault(_ring_of(message), {}), request, message)
        elif request == vhost.Request.ADD_MEM_REG:
            self._replace(self._regions, _guest_address(message), message)
        elif request == vhost.Request.REM_MEM_REG:
            self._remove(self._regions, _guest_address(message))
            message.close()
        elif request == vhost.Request.GET_VRING_BASE:
            ring = self._rings.get(_ring_of(message), {})
            for each in _ENDED_BY_A_STOP:
                self._remove(ring, each)
            if not self.running:
                # Nothing is in flight any more; the next start has an area of its own.
                self._remove(self._once, vhost.Request.SET_INFLIGHT_FD)
        else:
            message.close()

    def keep_answer(self, message: vhost.Message, answer: vhost.Message) -> None:
        """Keep an answer of a back-end, for a time without one."""
        self._answers[message.request] = answer.payload

    def answer(self, message: vhost.Message) -> bytes:
        """The answer in place of a back-end that is gone; call it before `keep`."""
        if message.request == vhost.Request.GET_VRING_BASE:
            ring = _ring_of(message)
            return vhost.VRING_STATE.pack(ring, self._used_index(ring))
        if message.request in self._answers and not message.flags & vhost.FLAG_NEED_REPLY:
            return self._answers[message.request]
        return vhost.U64.pack(0)  # an acknowledgement: it will be told

    @property
    def running(self) -> bool:
        """Whether any ring has been started."""
        return any(vhost.Request.SET_VRING_KICK in ring for ring in self._rings.values())

    @property
    def protocol_features(self) -> int:
        """The negotiated features; 0 before the negotiation."""
        agreed = self._once.get(vhost.Request.SET_PROTOCOL_FEATURES)
        return int(vhost.U64.unpack(agreed.payload)[0]) if agreed else 0

    @property
    def has_inflight(self) -> bool:
        return vhost.Request.SET_INFLIGHT_FD in self._once

    def told(self) -> Iterator[vhost.Message]:
        """All messages in the order of replay; the descriptors stay ours.

        A ring goes on at its used index: descriptors between it and the index of the available ring are
        either in the area for descriptors in flight or were never taken.
        """
        for request in _ONCE:
            if request in self._once:
                yield self._asking_for_ack(self._once[request])
        for region in self._regions.values():
            yield self._asking_for_ack(region)
        for number, ring in sorted(self._rings.items()):
            for request in _OF_A_RING:
                if request not in ring or request == vhost.Request.SET_VRING_ENABLE:
                    continue
                if request == vhost.Request.SET_VRING_BASE:
                    state = vhost.VRING_STATE.pack(number, self._used_index(number))
                    yield vhost.Message(request, state)
                else:
                    yield ring[request]
        for ring in self._rings.values():
            if vhost.Request.SET_VRING_KICK in ring and vhost.Request.SET_VRING_ENABLE in ring:
                yield ring[vhost.Request.SET_VRING_ENABLE]

    def wake_everybody(self) -> None:
        """Kick every running ring and interrupt its driver: either event may have died with the back-end."""
        for ring in self._rings.values():
            if vhost.Request.SET_VRING_KICK in ring:
                for request in (vhost.Request.SET_VRING_KICK, vhost.Request.SET_VRING_CALL):
                    for descriptor in ring[request].descriptors if request in ring else ():
                        os.eventfd_write(descriptor, 1)

    def close(self) -> None:
        for messages in (self._once, self._regions, *self._rings.values()):
            for message in messages.values():
                message.close()
            messages.clear()

    def _asking_for_ack(self, message: vhost.Message) -> vhost.Message:
        """The message with need_reply, if negotiated (never for the features themselves)."""
        if not self.protocol_features & vhost.PROTOCOL_REPLY_ACK or message.request in (
            vhost.Request.SET_PROTOCOL_FEATURES,
            vhost.Request.SET_OWNER,
        ):
            return vhost.Message(message.request, message.payload, message.descriptors)
        return vhost.Message(
            message.request, message.payload, message.descriptors, vhost.VERSION | vhost.FLAG_NEED_REPLY
        )

    def _used_index(self, number: int) -> int:
        """The used index in the guest's memory; 0 for a ring that was not started."""
        addresses = self._rings.get(number, {}).get(vhost.Request.SET_VRING_ADDR)
        if addresses is None:
            return 0
        _ring, _flags, _descriptors, used, _available, _log = vhost.VRING_ADDRESSES.unpack(addresses.payload)
        for descriptor, (_guest, size, start, offset) in self._mapped():
            if start <= used and used + _USED_INDEX.size <= start + size:
                place = offset + used - start
                page = place - place % mmap.ALLOCATIONGRANULARITY
                length = place - page + _USED_INDEX.size
                with mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=page) as memory:
                    (index,) = _USED_INDEX.unpack_from(memory, place - page)
                    return int(index)
        return 0

    def _mapped(self) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        table = self._once.get(vhost.Request.SET_MEM_TABLE)
        for message in (*([table] if table else ()), *self._regions.values()):
            for number, descriptor in enumerate(message.descriptors):
                yield (
                    descriptor,
                    vhost.REGION.unpack_from(message.payload, _REGION_AT + number * vhost.REGION.size),
                )

    @staticmethod
    def _replace(messages: dict[int, vhost.Message], key: int, message: vhost.Message) -> None:
        DeviceSetup._remove(messages, key)
        messages[key] = message

    @staticmethod
    def _remove(messages: dict[int, vhost.Message], key: int) -> None:
        before = messages.pop(key, None)
        if before is not None:
            before.close()


def _ring_of(message: vhost.Message) -> int:
    number = int.from_bytes(message.payload[:4], "little")
    if message.request in (
        vhost.Request.SET_VRING_KICK,
        vhost.Request.SET_VRING_CALL,
        vhost.Request.SET_VRING_ERR,
    ):
        number &= vhost.RING_MASK & ~vhost.NO_DESCRIPTOR
    return number


def _guest_address(message: vhost.Message) -> int:
    (address,) = vhost.U64.unpack_from(message.payload, _REGION_AT)
    return int(address)
