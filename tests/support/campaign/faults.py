"""What goes wrong in a campaign: one fault after the other, drawn from a seed, for a while, then healed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from emulator.jbof.control_client import ControlError
from tests.support.campaign import relay
from tests.support.campaign.findings import HUNG, WRONG, Findings
from tests.support.campaign.pod import AGENTS, DRIVES, ENCLOSURES, Pod
from tests.support.campaign.values import judged
from tests.support.campaign.victim import key_of
from tests.support.halting import halted
from tests.support.processes import Processes, Started

HELD_SECONDS = (0.7, 3.0)
QUIET_SECONDS = 0.5
BACK_SECONDS = 5.0
"""How long an enclosure stays away once the path to it is good again (docs/concurrency.md)."""
SLACK_SECONDS = 10.0
"""For a machine that has other things to do."""
VICTIM_SECONDS = (0.3, 1.5)
RATES = (0.003, 0.02, 0.08)
FLIPPED_BITS = 300
READ_ERROR = "unrecovered_read_error"
KEYS_DRIVE = DRIVES - 1
CLOCK_JUMPS = (3600.0, -3600.0, 0.0, 86_400.0)


class Faults:
    """Injects faults into a pod; `next` does one from its beginning to its end. One thread."""

    def __init__(
        self,
        pod: Pod,
        processes: Processes,
        seed: int,
        findings: Findings,
        stop: threading.Event,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._pod, self._processes, self._findings, self._over = pod, processes, findings, stop
        self._seed = seed
        self._dice = random.Random(f"{seed} faults")
        self._extents = pod.key_value_extents()
        self._victims = 0
        self._relayed: dict[str, int] = {}
        self._kinds: dict[str, Callable[[], None]] = {
            **{f"relay: {kind}": self._weather_of(kind) for kind in relay.FAULTS},
            "relay: mixed": self._mixed_weather,
            "relay killed": lambda: self._kill(f"relay-{self._at()}"),
            "enclosure killed": lambda: self._kill(f"jbof-{self._at()}"),
            "enclosure stopped": self._stop_enclosure,
            "agent killed": lambda: self._kill(f"agent-{self._dice.choice(AGENTS)}"),
            "writer by path killed": lambda: self._kill_victim("path"),
            "writer by session killed": lambda: self._kill_victim("session"),
            "flips at rest": self._flip_at_rest,
            "flips of values on reads": self._flip_on_reads,
            "misplaced writes": self._misplace,
            "drive slow": lambda: self._drive("slow", latency_ms=self._dice.choice((20.0, 300.0))),
            "drive hung": lambda: self._drive("hang"),
            "drive with errors": lambda: self._drive("error", status=READ_ERROR, probability=0.3),
            "drive full": lambda: self._drive("full"),
            "drive removed": self._remove,
            "wall clock jumps": self._jump,
        }  # fmt: skip
        if without - self._kinds.keys():
            raise ValueError(
                f"there is no fault {sorted(without - self._kinds.keys())}; of {sorted(self._kinds)}"
            )
        self._kinds = {kind: inject for kind, inject in self._kinds.items() if kind not in without}
        # Every kind once, in some order, before any comes again: a short run has seen many.
        self._left: list[str] = []

    def spare_the_agent(self) -> None:
        """From now on no agent is killed, so that its memory can be watched over one long life."""
        self._kinds.pop("agent killed", None)
        self._left = [kind for kind in self._left if kind != "agent killed"]

    def next(self) -> None:
        """The next fault, and the pod whole again behind it."""
        if not self._left:
            self._left = sorted(self._kinds)
            self._dice.shuffle(self._left)
        kind = self._left.pop()
        self._findings.begin(kind)
        try:
            self._kinds[kind]()
            self.heal()
        except (ControlError, AssertionError, ProcessLookupError) as error:
            self._findings.found(WRONG, f"{type(error).__name__}: {error}")
        self._revive()
        self._over.wait(QUIET_SECONDS)

    def _revive(self) -> None:
        """A process that ended by itself is a finding, and is started again."""
        for name in self._pod.names:
            started = self._pod.running[name]
            if not started.running:
                said = started.output[-1500:]
                self._findings.found(WRONG, f"{name} ended with {started.process.returncode}:\n{said}")
                self._pod.start_again(name)

    def heal(self) -> None:
        """Take every fault away, and wait until all enclosures are used again."""
        for at in range(ENCLOSURES):
            self._pod.weather(at)
            self._pod.ask(f"jbof-{at}", "heal")
        good = time.monotonic()
        waiting = set(AGENTS)
        while waiting:
            waiting = {agent for agent in waiting if not self._pod.is_whole(agent)}
            if waiting and time.monotonic() > good + BACK_SECONDS + SLACK_SECONDS:
                for agent in waiting:
                    self._findings.found(
                        HUNG, f"agent {agent}: an enclosure stays away: {self._state(agent)}"
                    )
                return
            time.sleep(0.05)
        self._findings.note("healings")

    def _state(self, agent: str) -> str:
        try:
            found = self._pod.status(agent)["enclosures"]
        except (OSError, ValueError) as error:
            return f"no status: {error}"
        return ", ".join(f"{each['name']} {each['namespaces']} {each['fault']}" for each in found)

    # -- how ------------------------------------------------------------------------------------

    def _at(self) -> int:
        return self._dice.randrange(ENCLOSURES)

    def _hold(self) -> None:
        self._over.wait(self._dice.uniform(*HELD_SECONDS))

    def _weather_of(self, kind: str) -> Callable[[], None]:
        def weather() -> None:
            rate = 0.5 if kind == "late_connect" else self._dice.choice(RATES)
            for at in self._dice.sample(range(ENCLOSURES), self._dice.randint(1, ENCLOSURES)):
                self._pod.weather(at, **{kind: rate})
            if kind == "late_connect":
                self._pod.weather(self._at(), late_connect=rate, reset=0.02)
            self._hold()
            self._count_relayed(kind)

        return weather

    def _mixed_weather(self) -> None:
        for at in range(ENCLOSURES):
            kinds = self._dice.sample(relay.FAULTS, 4)
            self._pod.weather(at, **{kind: self._dice.choice(RATES) for kind in kinds})
        self._hold()

    def _count_relayed(self, kind: str) -> None:
        """Add how many PDUs were hit."""
        hit = 0
        for at in range(ENCLOSURES):
            with suppress(ControlError):
                hit += self._pod.ask(f"relay-{at}", "stats")["counts"].get(kind, 0)
        before, self._relayed[kind] = self._relayed.get(kind, 0), hit
        self._findings.injected[self._findings.fault] += max(0, hit - before)

    def _kill(self, name: str) -> None:
        self._pod.kill(name)
        self._over.wait(self._dice.choice((0.0, 0.3, 1.5)))
        self._pod.start_again(name)
        if name.startswith("relay"):
            self._relayed.clear()

    def _stop_enclosure(self) -> None:
        pid = self._pod.running[f"jbof-{self._at()}"].pid
        with halted(pid):
            self._hold()

    def _drive(self, verb: str, **fields: object) -> None:
        self._pod.ask(f"jbof-{self._at()}", verb, drive=self._dice.randrange(DRIVES), **fields)
        self._hold()

    def _remove(self) -> None:
        at, drive = self._at(), self._dice.randrange(DRIVES)
        self._pod.ask(f"jbof-{at}", "remove", drive=drive)
        self._hold()
        self._pod.ask(f"jbof-{at}", "add", drive=drive)

    def _flip_at_rest(self) -> None:
        at, drive, offset, length = self._dice.choice(self._extents)
        self._pod.ask(f"jbof-{at}", "flip", drive=drive, offset=offset, length=length, bits=FLIPPED_BITS)
        self._pod.ask(f"jbof-{self._at()}", "flip", drive=KEYS_DRIVE, bits=FLIPPED_BITS)
        self._hold()

    def _flip_on_reads(self) -> None:
        at, drive, offset, length = self._dice.choice(self._extents)
        self._pod.ask(
            f"jbof-{at}",
            "flip",
            drive=drive,
            offset=offset,
            length=length,
            bits=3,
            on_read=True,
            probability=0.5,
        )
        self._hold()

    def _misplace(self) -> None:
        at, drive, offset, length = self._dice.choice(self._extents)
        blocks = length // 4096
        for _ in range(20):
            source, goal = (offset + 4096 * self._dice.randrange(blocks) for _ in range(2))
            self._pod.ask(f"jbof-{at}", "copy", drive=drive, source=source, offset=goal, length=4096)
        self._hold()

    def _jump(self) -> None:
        self._pod.set_clock(self._dice.choice(CLOCK_JUMPS))
        self._hold()

    def _kill_victim(self, door: str) -> None:
        agent = self._dice.choice(AGENTS)
        self._victims += 1
        label = f"{self._seed}-{self._victims}"
        folder = self._pod.mount(agent) / "kv" / "through"
        victim = self._processes.python("-m", "tests.support.campaign.victim", folder, door, label)
        with suppress(AssertionError):
            victim.wait_for_line("begun", 20)
        self._over.wait(self._dice.uniform(*VICTIM_SECONDS))
        victim.kill()
        self._look_at(victim, label, folder)

    def _look_at(self, victim: Started, label: str, folder: Path) -> None:
        """What a killed client began is a whole value or none."""
        begun = victim.output.count("begun ")
        self._findings.note("puts of killed writers", begun)
        for number in range(max(1, begun - 30), begun + 1):
            key = key_of(label, number)
            with suppress(OSError):
                data = (folder / key.hex()).read_bytes()
                if data and (wrong := judged(key, data).wrong):
                    self._findings.found(WRONG, f"value {number} of a killed writer: {wrong}")
