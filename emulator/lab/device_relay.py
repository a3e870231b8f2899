"""A relay between QEMU and the agent's virtio-fs device: the device survives a restart of the agent.

QEMU reconnects a vhost-user-blk device whose back-end has died, but not a vhost-user-fs one (with the
socket's `reconnect=` it does not even start). So QEMU talks to this relay, over a socket pair. The relay
passes the messages of set-up and tear-down on; requests and data go past it, through the guest's memory and
event descriptors. It remembers the messages, and replays them to the next agent. Descriptors in flight are in
an area that outlives the agent (INFLIGHT_SHMFD), which QEMU asks of a block device and the relay of ours.

    QEMU ── socket pair ── relay ── the agent's socket
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from emulator.lab import vhost_messages as vhost
from emulator.lab.device_setup import DeviceSetup
from emulator.lab.device_socket import cannot_connect, connected, hung_up, no_device, silent

RETRY_S = 0.1
TURNED_AWAY_S = 1.0
RINGS_MIN = 2
"""One for urgent requests, one for the others."""


class HungUp(vhost.MalformedMessage):
    """The listener has ended the connection where an answer was due."""


class DeviceRelay:
    """One device of one guest. A context manager; `qemu_end` is for QEMU, and closed by its starter.

    `request_queues`: the wished number, or fewer if the agent has fewer. `tell` is called, from the relay's
    thread, with a sentence when the agent goes and when it is back.
    """

    def __init__(
        self,
        path: Path,
        *,
        request_queues: int,
        queue_size: int,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Connect to the agent at `path`. Raises NoDeviceError where nobody serves such a device."""
        self._path = path
        self._queue_size = queue_size
        self._tell = tell
        self._setup = DeviceSetup()
        self._next_try = 0.0
        self._complaint = ""
        self._agent: socket.socket | None = None
        self.request_queues = min(request_queues, self._first_words() - 1)
        self._qemu, self.qemu_end = socket.socketpair()
        self._closing, self._close_seen = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="device-relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> "DeviceRelay":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the device; QEMU, if it still runs, loses it."""
        with contextlib.suppress(OSError):
            self._qemu.shutdown(socket.SHUT_RDWR)
        self._closing.close()
        self._thread.join()
        self.qemu_end.close()

    def _first_words(self) -> int:
        """Connect, and ask for the number of rings, that for urgent requests included. Raises NoDeviceError.

        Retries for a moment where the agent hangs up at once: the guest before this one may just be ending.
        """
        until = time.monotonic() + TURNED_AWAY_S
        while True:
            try:
                self._agent = connected(self._path)
            except OSError as error:
                raise cannot_connect(self._path, error) from None
            try:
                return self._offered_queues()
            except (OSError, vhost.MalformedMessage) as error:
                self._agent.close()
                self._agent = None
                if isinstance(error, TimeoutError):
                    raise silent(self._path) from None
                if isinstance(error, vhost.MalformedMessage) and not isinstance(error, HungUp):
                    raise no_device(self._path, f"it answers otherwise: {error}") from None
                if time.monotonic() > until:
                    raise hung_up(self._path) from None
            time.sleep(RETRY_S)

    def _offered_queues(self) -> int:
        """The number of rings. Raises as `_ask`."""
        for request in (
            vhost.Request.GET_FEATURES,
            vhost.Request.GET_PROTOCOL_FEATURES,
            vhost.Request.GET_QUEUE_NUM,
        ):
            answer = self._ask(vhost.Message(request))
        if answer is None or len(answer.payload) != vhost.U64.size:
            raise vhost.MalformedMessage("it does not say how many queues it has")
        (offered,) = vhost.U64.unpack(answer.payload)
        if offered < RINGS_MIN:
            raise vhost.MalformedMessage(f"it has {offered} queues")
        return int(offered)

    def _run(self) -> None:
        try:
            self._relay()
        except (OSError, vhost.MalformedMessage):
            pass  # QEMU has ended, and with it the device
        finally:
            for each in (self._qemu, self._close_seen, *([self._agent] if self._agent else ())):
                each.close()
            self._setup.close()

    def _relay(self) -> None:
        while True:
            watched = [self._qemu, self._close_seen, *([self._agent] if self._agent else ())]
            ready, _, _ = select.select(watched, [], [], None if self._agent else RETRY_S)
            if self._close_seen in ready:
                return
            if self._agent in ready:
                self._lose_agent()  # it speaks only when asked: this is its end
            if self._agent is None:
                self._find_agent()
            if self._qemu in ready:
                message = vhost.receive_message(self._qemu)
                if message is None:
                    return
                self._pass_on(message)

    def _pass_on(self, message: vhost.Message) -> None:
        """Pass a message of QEMU's to the agent if there is one; QEMU gets an answer in any case."""
        answer = self._asked_agent(message)
        if message.wants_answer:
            payload = self._setup.answer(message) if answer is None else answer.payload
            descriptors = () if answer is None else answer.descriptors
            vhost.send_message(self._qemu, vhost.answer_to(message, payload, descriptors))
        if answer is not None:
            self._setup.keep_answer(message, answer)
            answer.close()
        self._setup.keep(message)
        if message.request == vhost.Request.SET_FEATURES and self._agent is not None:
            try:
                self._take_inflight_area()
            except (OSError, vhost.MalformedMessage):
                self._lose_agent()

    def _asked_agent(self, message: vhost.Message) -> vhost.Message | None:
        if self._agent is None:
            return None
        try:
            return self._ask(message)
        except (OSError, vhost.MalformedMessage):
            self._lose_agent()
            return None

    def _ask(self, message: vhost.Message) -> vhost.Message | None:
        """Send it to the agent; its answer, where one is due. Raises OSError, MalformedMessage."""
        assert self._agent is not None
        vhost.send_message(self._agent, message)
        if not message.wants_answer:
            return None
        answer = vhost.receive_message(self._agent)
        if answer is None:
            raise HungUp("it hangs up; has another guest the device?")
        if answer.request != message.request:
            answer.close()
            raise vhost.MalformedMessage(
                f"request {answer.request} where {message.request} was to be answered"
            )
        return answer

    def _take_inflight_area(self) -> None:
        """Have the agent make the area for descriptors in flight, if it can, and keep it."""
        if self._setup.has_inflight or not self._setup.protocol_features & vhost.PROTOCOL_INFLIGHT:
            return
        wish = vhost.INFLIGHT.pack(0, 0, 1 + self.request_queues, self._queue_size)
        made = self._ask(vhost.Message(vhost.Request.GET_INFLIGHT_FD, wish))
        if made is None or not made.descriptors:
            return
        area = vhost.Message(vhost.Request.SET_INFLIGHT_FD, made.payload, made.descriptors)
        self._ask(area)
        self._setup.keep(area)

    def _lose_agent(self) -> None:
        assert self._agent is not None
        self._agent.close()
        self._agent = None
        self._next_try = 0.0
        self._tell("the agent has gone; the guest's requests wait for the next one")

    def _find_agent(self) -> None:
        """Try to connect, and replay all messages to a new agent."""
        if time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + RETRY_S
        try:
            self._agent = connected(self._path)
        except OSError:
            return
        try:
            self._ask(vhost.Message(vhost.Request.GET_FEATURES))
            self._ask(vhost.Message(vhost.Request.GET_PROTOCOL_FEATURES))
            for message in self._setup.told():
                answer = self._ask(message)
                if answer is not None and any(answer.payload):
                    raise vhost.MalformedMessage(
                        f"the agent refused message {vhost.Request(message.request).name}"
                    )
        except (OSError, vhost.MalformedMessage) as error:
            self._agent.close()
            self._agent = None
            # An OSError is the agent's end, and on a first try may be that of the one before.
            if isinstance(error, vhost.MalformedMessage) and str(error) != self._complaint:
                self._complaint = str(error)
                self._tell(f"an agent is back, but did not take the device: {error}")
            return
        self._complaint = ""
        self._setup.wake_everybody()
        self._tell("the agent is back; the guest goes on")
