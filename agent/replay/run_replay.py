"""Running a replay from start to report: threads, progress, and the checks at both ends."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

from agent.errors import UserError, did_you_mean
from agent.fs.doors.mounting import dead_mount_advice, is_mounted
from agent.host_os.hung_agent import HUNG_SECONDS, LOOK_SECONDS, AgentHangs, answers, asked
from agent.replay.absence import Absence
from agent.replay.content import BlockContent
from agent.replay.course import Course
from agent.replay.lru import LruBaseline
from agent.replay.player import Player, Schedule
from agent.replay.replay_options import ReplayOptions
from agent.replay.report import FromMemory, Report
from agent.replay.tally import Tally, total
from agent.replay.trace_lines import BLOCK_TOKENS, TraceFile
from agent.sizes import parse_size, readable_bytes
from host_shim.control_wire import KEYS_MAX, VALUE_BYTES_MAX
from host_shim.pool import CLOSE_SECONDS, Pool, UnknownVolume, ValueTooLong

_LOOK_SECONDS = 0.1
_LAST_JOIN_SECONDS = 5.0
"""How long the end of a replay waits for calls under way."""
PARTS_MAX: Final = KEYS_MAX
"""Values of one block: one round trip looks them up."""
_LONGER_VALUES = "a new pool has longer values by `g35 up --value-size`, other volumes by --volume"
_CHOOSE = "`g35 status` shows the volumes; choose one by --volume"


def open_pool(options: ReplayOptions) -> Pool:
    """The mounted pool, with a session for every player."""
    return Pool(options.mount, sessions=options.concurrency + 1)


def run_replay(options: ReplayOptions, opener: Callable[[ReplayOptions], Pool] = open_pool) -> Report:
    """Play the trace. Raises UserError where it cannot even begin; all else is in the report."""
    trace = TraceFile(options.trace, options.strict, options.requests)
    requests = iter(trace)
    first = list(itertools.islice(requests, 1))
    block_tokens = trace.block_tokens or BLOCK_TOKENS
    block_bytes = block_tokens * options.token_bytes
    look_seconds = min(LOOK_SECONDS, HUNG_SECONDS)
    with _opened(opener, options) as pool:
        if not asked(options.mount, pool.alive, look_seconds):
            advice = "start one with `g35 up`, or name another --mount"
            if is_mounted(options.mount):
                _check_session(options.mount / ".g35/session")
                advice = f"its agent has ended: {dead_mount_advice([options.mount])}"
            raise UserError(f"no g35 agent answers at {options.mount}", advice)
        stats = asked(options.mount, pool.stats, look_seconds)
        _check_volume(options.volume, stats)
        parts, value_bytes = cut(block_bytes, _longest_value(options.volume, stats))
        if parts > PARTS_MAX:
            raise UserError(
                f"a block of {readable_bytes(block_bytes)} would be {parts:,} values; "
                f"{PARTS_MAX:,} are the most",
                f"a block of this trace is {block_tokens} tokens, and {_LONGER_VALUES}",
            )
        baseline = _baseline(options, parts, block_bytes, stats)
        schedule = Schedule(itertools.chain(first, requests), options.time_scale, baseline)
        content = BlockContent(value_bytes, options.seed)
        volume = pool.volume(options.volume)
        absence = Absence(
            lambda: answers(options.mount, pool.alive, look_seconds),
            schedule.stopping,
            options.agent_wait,
        )
        players = [
            Player(
                volume,
                content,
                schedule,
                parts=parts,
                prestage=options.prestage,
                absence=absence,
                hung_seconds=HUNG_SECONDS,
            )
            for _ in range(options.concurrency)
        ]
        course = Course()
        with _explained(value_bytes):
            seconds = _play(players, schedule, absence, trace, course, options)
        alive = not absence.gave_up and _alive_in_the_end(pool, options.agent_wait)
        counted = asked(options.mount, pool.stats, look_seconds) if alive else {}
    return Report(
        sums=total(player.tally for player in players),
        seconds=seconds,
        value_bytes=value_bytes,
        block_bytes=block_bytes,
        parts=parts,
        planned_requests=trace.requests,
        finished=trace.finished,
        mount_alive=alive,
        agent_waits=absence.waits,
        agent_wait_seconds=round(absence.seconds, 3),
        gave_up_seconds=options.agent_wait if absence.gave_up else None,
        broken_lines=trace.broken_lines,
        concurrency=options.concurrency,
        complaints=trace.complaints,
        lru_hit_ratio=round(baseline.hit_ratio, 6) if baseline else None,
        lru_blocks=baseline.capacity if baseline else None,
        samples=course.samples,
        memory=_from_memory(options.volume, stats, counted),
    )


@contextmanager
def _opened(opener: Callable[[ReplayOptions], Pool], options: ReplayOptions) -> Iterator[Pool]:
    """The pool, closed at the end without waiting for calls that an agent does not answer."""
    pool = opener(options)
    wait = CLOSE_SECONDS
    try:
        yield pool
    except AgentHangs:
        wait = 0.0
        raise
    finally:
        pool.close(wait)


def _play(
    players: list[Player],
    schedule: Schedule,
    absence: Absence,
    trace: TraceFile,
    course: Course,
    options: ReplayOptions,
) -> float:
    threads = [
        threading.Thread(target=player.run, name=f"player {number}", daemon=True)
        for number, player in enumerate(players)
    ]
    began = time.monotonic()
    course.watch(0.0, total(player.tally for player in players))
    for thread in threads:
        thread.start()
    try:
        with _progress(options, trace, absence) as show:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(_LOOK_SECONDS)
                for thread in threads[1:]:
                    thread.join(_LOOK_SECONDS if not threads[0].is_alive() else 0)
                sums = total(player.tally for player in players)
                course.watch(time.monotonic() - began, sums)
                show(sums)
                if any(player.clock.hangs for player in players):
                    raise AgentHangs(options.mount, HUNG_SECONDS)
    finally:
        schedule.stopping.set()
        hangs = any(player.clock.hangs for player in players)
        end = time.monotonic() + (0.0 if hangs else _LAST_JOIN_SECONDS)
        for thread in threads:
            # One that hangs in the mount is left behind; it ends with the process.
            thread.join(max(0.0, end - time.monotonic()))
    seconds = time.monotonic() - began
    course.watch(seconds, total(player.tally for player in players), last=True)
    if schedule.failure is not None:
        raise schedule.failure
    return seconds


@contextmanager
def _progress(
    options: ReplayOptions, trace: TraceFile, absence: Absence
) -> Iterator[Callable[[Tally], None]]:
    """A bar on standard error, where somebody looks at it; what is said meanwhile goes above it."""
    if options.json_output or not sys.stderr.isatty():
        yield lambda sums: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    known = options.requests or None
    columns = (
        TextColumn("{task.completed:,.0f} requests"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        absence.say = progress.console.print
        bar = progress.add_task("", total=known, figures="")

        def show(sums: Tally) -> None:
            ratio = 100 * sums.hits / max(sums.blocks, 1)
            moved = readable_bytes(sums.bytes_read + sums.bytes_written)
            at_end = trace.requests if trace.finished else known
            progress.update(
                bar, completed=sums.requests, total=at_end, figures=f"{ratio:.1f} % hits, {moved} moved"
            )

        yield show


def _check_session(session: Path) -> None:
    """Raises UserError where an agent serves the file, and not to this user."""
    with suppress(OSError):
        owner = session.stat().st_uid
        if not os.access(session, os.R_OK | os.W_OK):
            raise UserError(
                f"{session} belongs to user {owner}, and you may not open it", "run this as that user"
            )


def _check_volume(name: str, stats: dict[str, Any]) -> None:
    known = [str(volume["name"]) for volume in stats.get("volumes", ())]
    if known and name not in known:
        raise UserError(f"the pool has no volume {name!r}{did_you_mean(name, known)}", _CHOOSE)


@contextmanager
def _explained(value_bytes: int) -> Iterator[None]:
    try:
        yield
    except UnknownVolume as error:
        raise UserError(str(error), _CHOOSE) from None
    except ValueTooLong as error:
        raise UserError(
            str(error),
            f"a value has {readable_bytes(value_bytes)}: choose a smaller --bytes-per-token; "
            f"{_LONGER_VALUES}",
        ) from None


def _from_memory(volume: str, before: dict[str, Any], after: dict[str, Any]) -> FromMemory | None:
    looks = [each for found in (before, after) for each in found.get("volumes", ()) if each["name"] == volume]
    return FromMemory.between(looks[0], looks[1]) if len(looks) == 2 else None


def cut(block_bytes: int, longest: int) -> tuple[int, int]:
    """How many values of equal length a block takes, and that length: a multiple of 8, as contents want it.
    So a block that no such values make up is a few bytes longer there."""
    words = -(-block_bytes // 8)
    parts = -(-words // (longest // 8))
    return parts, -(-words // parts) * 8


def _longest_value(volume: str, stats: dict[str, Any]) -> int:
    told = [int(each["value_bytes"]) for each in stats.get("volumes", ()) if each["name"] == volume]
    return max(8, min([VALUE_BYTES_MAX, *told]))


def _baseline(
    options: ReplayOptions, parts: int, block_bytes: int, stats: dict[str, Any]
) -> LruBaseline | None:
    """An LRU of as many blocks as the volume has slots for, or as --lru-bytes has room for."""
    if options.lru_bytes:
        capacity = cast(int, parse_size(options.lru_bytes)) // block_bytes
    else:
        slots = [each["slots"] for each in stats.get("volumes", ()) if each["name"] == options.volume]
        capacity = slots[0] // parts if slots else 0
    return LruBaseline(capacity) if capacity else None


def _alive_in_the_end(pool: Pool, seconds: float) -> bool:
    """Whether an agent answers; one that is just being restarted gets as long as during the replay."""
    deadline = time.monotonic() + seconds
    while not pool.alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
