"""Which process of the agent a get asks: an agent may be several, and each serves gets.

The first serves everything. The others have mounts of their own within its mount (`PROCESS_FOLDER`), and
what one of them does not serve now, or does not live to serve, the first is asked for. Gets go to all in
turn, so that no single interpreter is what bounds them. Puts go to all but the first, which decides for
those, too, where values go. A key that was asked to be prestaged waits in the
memory of the first.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from host_shim.control_session import SessionLender
from host_shim.control_wire import SESSION_PATH
from host_shim.session_files import Files

LOOK_SECONDS: Final = 5.0
"""Between two looks for processes; an agent that starts again may have others."""
ASIDE_SECONDS: Final = 1.0
"""A process is not asked for values of a volume again, once it has refused, nor for any once it was away."""
PROCESSES_MAX: Final = 64
BATCHES: Final = "\0"
SINGLES: Final = "\1"
"""Before a volume's name: with batches of its puts, or with puts of one value, a process is left alone, and
is still asked for its values. One that has too few processors for the latter takes the former."""
PART_KEYS: Final = 32
"""Of a batch, that are worth a request of their own to another process."""
UNHEARD_MAX: Final = 2
"""Requests to a process since its last answer; further ones go to others. With two for each answer a process
that comes back gets its share again; with one it would keep a single thread for good."""
BUSIER: Final = 2
"""So many requests more are under way at the others where a process gets the second of these."""
SILENCE_STEP: Final = 0.002
"""Seconds. Where none is ready for more, the least silent one is asked; silences up to this time, up to twice
it, four times and so on are alike."""
SILENT: Final = 6
"""After more doublings, 0.13 s, without an answer to a request a process is sent no put, as long as the first
one is there for it."""
PRESTAGED_MAX: Final = 16_384
"""Keys of which it is remembered that they were asked to be prestaged; then all are forgotten."""


class AskTheFirst(Exception):
    """The process that was asked does not serve this now."""


class AgentProcesses:
    """Those behind one mount. Safe from any thread."""

    def __init__(
        self,
        mount: str,
        files: Files,
        first: SessionLender,
        lender: Callable[[str], SessionLender],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lender` makes one for the session's file at a path."""
        self._mount = mount
        self._clock = clock
        self._files = files
        self._first: Final = first
        self._make = lender
        self._known: dict[str, SessionLender] = {}
        self._all: tuple[SessionLender, ...] = (first,)
        self._turn = itertools.count()
        self._put_turn = itertools.count()
        self._putting: dict[int, int] = {}
        """Puts under way, by the id of their lender; where there are others than the first."""
        self._counting = threading.Lock()
        self._look_at = 0.0
        self._looking = threading.Lock()
        self._is_closed = False
        self._aside: dict[tuple[int, str], float] = {}
        """Lender, by its id, and volume; the empty name stands for all. And until when."""
        self._prestaged: set[tuple[str, bytes]] = set()
        self._silent: dict[int, tuple[int, float]] = {}
        """Lender, by its id: how many answers it had given when it was found with its share, and when."""

    def next(self, volume: str, keys: Sequence[bytes]) -> SessionLender:
        """Whose turn it is to serve a get of some keys."""
        if self._clock() >= self._look_at:
            self._look()
        everyone = self._all
        if len(everyone) == 1:
            return self._first
        turn = next(self._turn) % len(everyone)
        chosen = everyone[turn]
        under_way = chosen.under_way()
        if under_way > 0 and (chosen.unheard() > 0 or under_way > everyone[turn - 1].under_way() + 1):
            chosen = self._instead(turn, everyone, volume)
        if chosen is self._first or (self._aside and self._is_aside(chosen, volume)):
            return self._first
        if self._prestaged and self._forget_prestaged(volume, keys):
            return self._first
        return chosen

    def begin_put(self, volume: str, values: int) -> SessionLender:
        """Who is to take so many values of a volume, until `end_put`: the one of the others with the fewest
        puts of this client, or whose turn it is.

        The first is what bounds puts, so it is left out, unless the others have their share. One that is set
        aside takes none, and has no puts under way: it would be the one with the fewest time and again, and
        its puts would go to the first.
        """
        if self._clock() >= self._look_at:
            self._look()
        everyone = self._all
        if len(everyone) == 1:
            return self._first
        turn, most, kind = next(self._put_turn), len(everyone) - 1, _kind_of(values)
        with self._counting:
            putting = self._putting
            others = [everyone[1 + (turn + at) % most] for at in range(most)]
            if self._aside:
                others = [each for each in others if not self._is_aside(each, kind + volume)]
            chosen = self._first
            if ready := [each for each in others if not self._is_busy(each)]:
                chosen = min(ready, key=lambda each: putting.get(id(each), 0))
            elif self._is_behind(chosen):
                several = (*others, chosen)
                ranks = [(self._silence(each), putting.get(id(each), 0)) for each in several]
                chosen = several[ranks.index(min(ranks))]
            putting[id(chosen)] = putting.get(id(chosen), 0) + 1
        return chosen

    def end_put(self, lender: SessionLender) -> None:
        """See `begin_put`."""
        if not self._putting:
            return
        with self._counting:
            left = self._putting.get(id(lender), 0) - 1
            if left > 0:
                self._putting[id(lender)] = left
            else:
                self._putting.pop(id(lender), None)

    def parts_of(self, count: int, most: int) -> list[slice]:
        """The parts of a batch of so many keys that different processes may serve, `most` of them."""
        parts = min(len(self._all), most, count // PART_KEYS)
        if parts < 2:
            return [slice(0, count)]
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def set_aside(self, lender: SessionLender, volume: str = "") -> None:
        """It has refused; leave it alone for a moment, with this volume or with all."""
        self._aside[id(lender), volume] = self._clock() + ASIDE_SECONDS

    def set_aside_with_puts(self, lender: SessionLender, volume: str, values: int) -> None:
        """It has refused to take so many values; leave it alone for a moment with puts of their kind."""
        self.set_aside(lender, _kind_of(values) + volume)

    def note_prestaged(self, volume: str, keys: Sequence[bytes]) -> None:
        if len(self._all) == 1:
            return
        if len(self._prestaged) + len(keys) > PRESTAGED_MAX:
            self._prestaged = set()
        self._prestaged.update((volume, key) for key in keys[:PRESTAGED_MAX])

    def close(self) -> list[SessionLender]:
        """Close the sessions of the processes beside the first, whose lenders are given back."""
        with self._looking:
            self._is_closed = True
            self._all = (self._first,)
            lenders = list(self._known.values())
        for lender in lenders:
            lender.close()
        return lenders

    def after_fork_in_child(self) -> None:
        self._looking = threading.Lock()
        self._counting, self._putting = threading.Lock(), {}
        for lender in self._known.values():
            lender.abandon()

    def _is_busy(self, lender: SessionLender) -> bool:
        """Whether puts are to go elsewhere."""
        return self._is_behind(lender, 1) and (
            lender.unheard() >= UNHEARD_MAX or self._silence(lender) > SILENT
        )

    def _instead(self, turn: int, everyone: Sequence[SessionLender], volume: str) -> SessionLender:
        """Who is to be asked where the one whose turn it is has requests under way.

        Of two that were sent none since their last answer it is the one with fewer under way. One that was
        sent one since is asked before them where it has far fewer. Where all were sent some, it is the least
        silent one, of several the one with the fewest under way.
        """
        chosen: SessionLender | None = None
        spare: SessionLender | None = None
        fewest = fewest_of_spare = 0
        for at in range(turn - len(everyone), turn):
            each = everyone[at]
            if self._aside and self._is_aside(each, volume):
                continue
            unheard, under_way = each.unheard(), each.under_way()
            if unheard <= 0:
                if chosen is not None:
                    if under_way < fewest:
                        chosen, fewest = each, under_way
                    break
                chosen, fewest = each, under_way
            elif unheard >= UNHEARD_MAX:
                self._is_behind(each)
            elif spare is None or under_way < fewest_of_spare:
                spare, fewest_of_spare = each, under_way
        if chosen is None:
            return self._least_silent(everyone, turn, volume)
        if spare is not None and fewest_of_spare + BUSIER <= fewest:
            self._is_behind(spare, 1)
            if not self._silence(spare):
                return spare
        return chosen

    def _least_silent(self, everyone: Sequence[SessionLender], turn: int, volume: str) -> SessionLender:
        in_turn = [*everyone[turn:], *everyone[:turn]]
        if self._aside:
            in_turn = [each for each in in_turn if not self._is_aside(each, volume)]
        for each in in_turn:
            self._is_behind(each, 1)
        ranks = [(self._silence(each), each.under_way()) for each in in_turn]
        return in_turn[ranks.index(min(ranks))] if ranks else self._first

    def _is_behind(self, lender: SessionLender, most: int = UNHEARD_MAX) -> bool:
        """Whether it was sent so many requests since its last answer. It counts as silent from then on."""
        if lender.unheard() < most:
            return False
        found = self._silent.get(id(lender))
        if found is None or found[0] != lender.answers:
            self._silent[id(lender)] = lender.answers, self._clock()
        return True

    def _silence(self, lender: SessionLender) -> int:
        """For how long it has been silent, as of SILENCE_STEP."""
        answers, since = self._silent.get(id(lender), (-1, 0.0))
        return int((self._clock() - since) / SILENCE_STEP).bit_length() if answers == lender.answers else 0

    def _is_aside(self, lender: SessionLender, volume: str) -> bool:
        now = self._clock()
        for which in ("", volume):
            until = self._aside.get((id(lender), which))
            if until is not None:
                if now < until:
                    return True
                self._aside.pop((id(lender), which), None)
        return False

    def _forget_prestaged(self, volume: str, keys: Sequence[bytes]) -> bool:
        """Whether one of the keys was asked to be prestaged, which it is for one get."""
        found = False
        for key in keys:
            if (volume, key) in self._prestaged:
                self._prestaged.discard((volume, key))
                found = True
        return found

    def _look(self) -> None:
        with self._looking:
            if self._is_closed or not self._first.reached or self._clock() < self._look_at:
                return
            self._look_at = self._clock() + LOOK_SECONDS  # from here on it is nobody else's to look
        inside = os.path.join(self._mount, os.path.dirname(SESSION_PATH))
        folders = self._files.processes(inside)
        with self._looking:
            if self._is_closed:
                return  # type: ignore[unreachable]
            for folder in folders[: PROCESSES_MAX - 1]:
                if folder not in self._known:
                    self._known[folder] = self._make(os.path.join(inside, folder, SESSION_PATH))
            self._all = (self._first, *(self._known[each] for each in folders if each in self._known))


def _kind_of(values: int) -> str:
    """Of a put of so many values, as of `BATCHES`."""
    return SINGLES if values == 1 else BATCHES
