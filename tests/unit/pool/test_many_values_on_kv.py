"""`put_many` and `get_many` of a volume on KV namespaces: as one by one, which is how they move there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from agent.fs.control.registered_memory import RegisteredMemory
from agent.pool.access import serve
from host_shim.pool import Pool
from tests.support.engines.counted_door import Counted
from tests.support.pool.memory_pool import PoolAgent, key_of
from tests.unit.pool.test_kv_volume import MIB, World

COUNT = 40


def door_of(world: World, memory: RegisteredMemory) -> Counted:
    channel = cast("Any", world.channel)
    channel.run = world.scheduler.finish
    agent = SimpleNamespace(volume=world.volume, channel=channel, served=serve(world.volume), prestage=None)
    return Counted(cast(PoolAgent, agent), memory)


def content(number: int) -> bytes:
    return bytes([number]) * (1 + number * 977 % 9000)


def test_batches_are_served_one_by_one(memory: RegisteredMemory) -> None:
    world = World()
    door = door_of(world, memory)
    keys = [key_of(number) for number in range(COUNT)]
    values = [content(number) for number in range(COUNT)]
    with Pool("/nowhere", files=door, parallel=1) as pool:
        volume = pool.volume("v")
        assert volume.put_many([*keys, keys[0]], [*values, b"second"]) == [True] * (COUNT + 1)
        assert volume.put_many(keys, [b"third"] * COUNT) == [True] * COUNT, "they are there already"
        buffers = [bytearray(9000) for _ in keys]
        assert volume.get_many(keys, buffers) == [len(value) for value in values]
        assert [bytes(room[: len(value)]) for room, value in zip(buffers, values, strict=True)] == values
        assert volume.delete(keys[:5]) == [True] * 5
        found = volume.get_many(keys, buffers)
        assert [length is None for length in found] == [True] * 5 + [False] * (COUNT - 5)
        assert (door.asked["STORE_MANY"], door.asked["LOAD_MANY"]) == (1, 1), "refused, and not asked again"
        assert not len(world.volume.puts_in_pieces)


def test_where_a_namespace_is_away_the_batch_stores_and_serves_what_the_other_has(
    memory: RegisteredMemory,
) -> None:
    world = World((16 * MIB, 16 * MIB))
    keys = [key_of(number) for number in range(COUNT)]
    at = [world.volume.namespace_of(world.volume.placement.pseudonym(key)) for key in keys]
    assert set(at) == {0, 1}
    with Pool("/nowhere", files=door_of(world, memory), parallel=1) as pool:
        volume = pool.volume("v")
        world.namespaces[0].down = True
        stored = volume.put_many(keys, [content(number) for number in range(COUNT)])
        assert stored == [place == 1 for place in at]
        buffers = [bytearray(9000) for _ in keys]
        found = volume.get_many(keys, buffers)
        assert [length is not None for length in found] == stored
        world.namespaces[0].down = False
        for number, (room, length) in enumerate(zip(buffers, volume.get_many(keys, buffers), strict=True)):
            assert length is None or bytes(room[:length]) == content(number)
