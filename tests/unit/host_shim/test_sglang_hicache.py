"""SGLang's HiCache back-end against modules of SGLang's shape: pages, prefixes, and no exception."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

from host_shim import named_values
from host_shim.pool import Pool
from tests.support.engines.fake_engines import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    connector_with_fake_engine,
)
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

PAGE_TOKENS, PIECE_BYTES = 4, 32
KEYS = [f"{at:064x}" for at in range(6)]


class HostPool:
    """A host memory pool of pages that consist of two pieces, k and v, far from each other."""

    def __init__(self, pages: int = 6, layout: str = "page_first") -> None:
        self.layout, self.page_size, self.dtype = layout, PAGE_TOKENS, "float16"
        self.memory = (ctypes.c_ubyte * (2 * pages * PIECE_BYTES))()
        self.view = memoryview(self.memory)
        self.pages = pages

    def pieces(self, page: int) -> list[memoryview]:
        starts = (page * PIECE_BYTES, (self.pages + page) * PIECE_BYTES)
        return [self.view[start : start + PIECE_BYTES] for start in starts]

    def fill(self, page: int, value: int) -> None:
        for at, piece in enumerate(self.pieces(page)):
            ctypes.memmove(self.address(page, at), bytes([value + at]) * PIECE_BYTES, len(piece))

    def content(self, page: int) -> list[bytes]:
        return [bytes(piece) for piece in self.pieces(page)]

    def address(self, page: int, piece: int) -> int:
        return ctypes.addressof(self.memory) + (piece * self.pages + page) * PIECE_BYTES

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        pages = [first // PAGE_TOKENS for first in indices[::PAGE_TOKENS]]
        addresses = [self.address(page, piece) for page in pages for piece in range(2)]
        return addresses, [PIECE_BYTES] * len(addresses)


class Tensor:
    """A contiguous tensor of bytes."""

    def __init__(self, data: bytes, contiguous: bool = True) -> None:
        self.memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self._contiguous = contiguous

    def numel(self) -> int:
        return len(self.memory)

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def contiguous(self) -> Tensor:
        return self


class Transposed(Tensor):
    """A tensor whose contiguous copy is a temporary; its memory is used for others when nobody has it."""

    memories: ClassVar[list[Any]] = []

    def __init__(self, data: bytes) -> None:
        super().__init__(data[::-1], contiguous=False)

    def contiguous(self) -> Tensor:
        copy = Tensor(bytes(self.memory)[::-1])
        self.memories.append(copy.memory)
        weakref.finalize(copy, ctypes.memset, copy.memory, 0xEE, len(copy.memory))
        return copy


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def module(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with connector_with_fake_engine("host_shim.sglang_hicache") as module:
        monkeypatch.setattr(named_values, "Pool", functools.partial(Pool, files=agent))
        yield module


def config(
    prestage: bool = True, pools: dict[str, str] | None = None, **changes: Any
) -> HiCacheStorageConfig:
    ours = {"mount": "/nowhere", "prestage": prestage, "pools": pools or {}}
    extra = {"backend_name": "g35", "interface_v1": 1, "g35": ours}
    return HiCacheStorageConfig(extra, **changes)


@pytest.fixture
def make(module: ModuleType, agent: ScriptedAgent) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(host: HostPool | None = None, **changes: Any) -> Any:
        made.append(module.G35HiCache(config(**changes), {}))
        made[-1].register_mem_pool_host(host or HostPool())
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    assert agent.open_files == 0


def indices(*pages: int) -> list[int]:
    return [page * PAGE_TOKENS + token for page in pages for token in range(PAGE_TOKENS)]


def test_pages_move_between_the_pool_and_where_they_lie(
    agent: ScriptedAgent, make: Callable[..., Any]
) -> None:
    source, target = HostPool(), HostPool()
    for page in range(6):
        source.fill(page, 10 * page)
    writer, reader = make(source), make(target)
    assert writer.batch_set_v1(KEYS[:2] + KEYS[3:], indices(0, 1, 3, 4, 5)) == [True] * 5
    assert len(agent.values) == 5  # one value a page
    assert reader.batch_exists(KEYS) == 2
    assert len(agent.prestaged) == 2
    assert reader.exists(KEYS[5])
    assert reader.batch_get_v1(KEYS, indices(5, 4, 3, 2, 1, 0)) == [True, True, False, True, True, True]
    assert target.content(5) == source.content(0)
    assert target.content(2) == source.content(3)
    assert reader.batch_get_v1([], []) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "org/other"},
        {"tp_rank": 1},
        {"tp_size": 2},
        {"pp_rank": 1},
        {"attn_cp_rank": 1},
        {"dcp_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_shard_does_not_see_the_page(make: Callable[..., Any], changes: dict[str, Any]) -> None:
    make().batch_set_v1(KEYS[:1], indices(0))
    assert make().exists(KEYS[0])
    assert not make(**changes).exists(KEYS[0])


def test_a_layout_is_part_of_the_name(make: Callable[..., Any]) -> None:
    make().batch_set_v1(KEYS[:1], indices(0))
    assert not make(HostPool(layout="layer_first")).exists(KEYS[0])


def test_ranks_of_mla_share_pages_but_not_states(make: Callable[..., Any]) -> None:
    ranks = [make(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    for each in ranks:
        each.register_mem_host_pool_v2(HostPool(), PoolName.MAMBA)
    ranks[0].batch_set_v1(KEYS[:1], indices(0))
    ranks[0].batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(0), KEYS[:1])])
    assert ranks[1].exists(KEYS[0])
    found = ranks[1].batch_exists_v2(KEYS[:1], [PoolTransfer(PoolName.MAMBA)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert ranks[0].batch_exists_v2(KEYS[:1], [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 1


def test_pools_of_hybrid_models(make: Callable[..., Any], expects_log: Callable[..., None]) -> None:
    pages, states = HostPool(), HostPool()
    made = make(pages, prestage=False)
    made.register_mem_host_pool_v2(pages, PoolName.KV)
    made.register_mem_host_pool_v2(states, PoolName.MAMBA)
    states.fill(2, 77)
    transfers = [
        PoolTransfer(PoolName.KV, indices(0, 1, 2, 3, 4), KEYS[:5]),
        PoolTransfer(PoolName.MAMBA, indices(2), KEYS[2:3]),
    ]
    assert made.batch_set_v2(transfers) == {PoolName.KV: [True] * 5, PoolName.MAMBA: [True]}
    window = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = made.batch_exists_v2(KEYS, [window])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 3}
    assert made.batch_exists_v2(KEYS, [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 0
    assert made.batch_get_v2([PoolTransfer(PoolName.MAMBA, indices(4), KEYS[2:3])]) == {
        PoolName.MAMBA: [True]
    }
    assert states.content(4) == states.content(2)
    expects_log("cannot serve this: hit policy")
    unknown = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.OF_TOMORROW)
    assert made.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0


GROUP_KEYS = [f"{at:064x}" for at in range(100, 106)]


@pytest.mark.parametrize(
    ("stored", "covered"),
    [
        pytest.param((0, 1, 2, 3, 4, 5), 6, id="no more than was asked"),
        pytest.param((0, 1, 2, 3), 4, id="two groups"),
        pytest.param((0, 1, 2, 4, 5), 2, id="a group with a hole ends the run"),
        pytest.param((1, 2, 3), 0, id="the first is not whole"),
    ],
)
def test_groups_of_blocks_are_told_and_hold_up_nothing(
    make: Callable[..., Any], stored: tuple[int, ...], covered: int
) -> None:
    made = make(prestage=False)
    made.register_mem_host_pool_v2(HostPool(), PoolName.COMPRESSED)
    assert made.batch_set_v1(KEYS[:5], indices(0, 1, 2, 3, 4)) == [True] * 5
    keys = [GROUP_KEYS[at] for at in stored]
    made.batch_set_v2([PoolTransfer(PoolName.COMPRESSED, indices(*stored), keys)])
    groups = PoolTransfer(
        PoolName.COMPRESSED,
        keys=GROUP_KEYS,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=2,
        group_pages=2,
    )
    found = made.batch_exists_v2(KEYS, [groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [1, 2, 3, 4, 5])
    told = {PoolName.COMPRESSED: covered} if covered else {}
    assert found.extra_pool_hit_pages == {PoolName.KV: 5} | told


def test_groups_of_blocks_stand_beside_pools_that_decide(make: Callable[..., Any]) -> None:
    made = make(prestage=False)
    for name in (PoolName.COMPRESSED, PoolName.MAMBA):
        made.register_mem_host_pool_v2(HostPool(), name)
    made.batch_set_v1(KEYS, indices(*range(6)))
    made.batch_set_v2(
        [
            PoolTransfer(PoolName.COMPRESSED, indices(0, 1, 2), GROUP_KEYS[:3]),
            PoolTransfer(PoolName.MAMBA, indices(0), KEYS[3:4]),
        ]
    )
    groups = PoolTransfer(
        PoolName.COMPRESSED,
        keys=GROUP_KEYS[:2],
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=3,
        group_pages=1,
    )
    window = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    for transfers in ([groups, window], [window, groups]):
        found = made.batch_exists_v2(KEYS, transfers)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4, PoolName.COMPRESSED: 6}


@pytest.mark.parametrize("geometry", [(0, 1), (1, 0), (0, 0)])
def test_groups_of_no_size_are_none(make: Callable[..., Any], geometry: tuple[int, int]) -> None:
    made = make(prestage=False)
    made.batch_set_v1(KEYS, indices(*range(6)))
    block, group = geometry
    for keys in (None, GROUP_KEYS):
        strange = PoolTransfer(
            PoolName.COMPRESSED,
            keys=keys,
            hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=block,
            group_pages=group,
        )
        found = made.batch_exists_v2(KEYS, [strange])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (6, {PoolName.KV: 6})


def test_pools_of_hybrid_models_have_volumes_of_their_own(
    agent: ScriptedAgent, make: Callable[..., Any]
) -> None:
    agent.serve(("kv", "small", "states"))
    pools = {"mamba": "states", "deepseek_v4_c4": "small"}
    writer, reader = make(pools=pools, prestage=False), make(HostPool(), pools=pools, prestage=False)
    hosts = {name: HostPool() for name in PoolName}
    for each in (writer, reader):
        for name, host in hosts.items():
            each.register_mem_host_pool_v2(host, name)
    hosts[PoolName.MAMBA].fill(1, 7)
    transfers = [PoolTransfer(name, indices(0, 1), KEYS[:2]) for name in PoolName]
    assert set(map(all, writer.batch_set_v2(transfers).values())) == {True}
    assert sorted(volume for volume, _ in agent.values) == ["kv"] * 2 + ["small"] * 2 + ["states"] * 2
    writer.batch_set_v2([PoolTransfer(PoolName.KV, indices(2), KEYS[2:3])])
    asked = [PoolTransfer(PoolName.MAMBA), PoolTransfer(PoolName.COMPRESSED)]
    found = reader.batch_exists_v2(KEYS, asked)
    assert found.kv_hit_pages == 2
    assert found.extra_pool_hit_pages == {PoolName.KV: 3, PoolName.MAMBA: 2, PoolName.COMPRESSED: 2}
    moved = reader.batch_get_v2([PoolTransfer(PoolName.MAMBA, indices(4, 5), KEYS[:2])])
    assert moved == {PoolName.MAMBA: [True, True]}
    assert hosts[PoolName.MAMBA].content(5) == hosts[PoolName.MAMBA].content(1)


def test_a_volume_of_a_pool_that_is_not_there_is_said_at_the_start(
    module: ModuleType, agent: ScriptedAgent
) -> None:
    with pytest.raises(ValueError, match="no volume 'absent'"):
        module.G35HiCache(config(pools={"mamba": "absent"}))
    assert agent.open_files == 0


def test_tensors(make: Callable[..., Any]) -> None:
    made = make()
    assert made.set(KEYS[0], Tensor(b"value"))
    room = Tensor(bytes(5))
    assert made.get(KEYS[0], room) is room
    assert bytes(room.memory) == b"value"
    assert made.batch_get(KEYS[:2], [room, Tensor(bytes(5))]) == [room, None]
    assert made.batch_get(KEYS[:1], [Tensor(bytes(5), contiguous=False)]) == [None]
    assert made.batch_get(KEYS[:1]) == [None]
    assert not made.batch_set(KEYS[:2], [Tensor(b"v")])
    assert not made.set(KEYS[1], None)
    assert made.get(KEYS[0], Tensor(bytes(4))) is None
    assert not made.exists(
        KEYS[0]
    )  # of another length than the engine's pages: deleted, so that it can be stored


@pytest.mark.parametrize("broken", ["raises", "counts", "absent"])
def test_a_host_pool_without_page_buffers_is_misses(
    make: Callable[..., Any], expects_log: Callable[..., None], broken: str
) -> None:
    host = HostPool()

    def buffers(indices: list[int]) -> tuple[list[int], list[int]]:
        if broken == "raises":
            raise ValueError("Unsupported layout: x")
        return [host.address(0, 0)], [PIECE_BYTES]

    expects_log("cannot serve this: (no page buffers|1 page buffers for 2)")
    host.get_page_buffer_meta = buffers  # type: ignore[method-assign]
    made = make(host)
    if broken == "absent":
        made.mem_pool_host = None
        expects_log()
    assert made.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert made.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]


def test_an_agent_that_dies_is_misses_until_it_is_back(
    agent: ScriptedAgent, make: Callable[..., Any]
) -> None:
    made = make()
    made.batch_set_v1(KEYS[:2], indices(0, 1))
    agent.kill()
    assert made.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert made.batch_set_v1(KEYS[2:3], indices(2)) == [False]
    assert made.batch_exists(KEYS) == 0
    agent.restart()
    made._values._pool.alive()
    assert made.batch_get_v1(KEYS[:2], indices(0, 1)) == [True, True]


def test_clear_is_refused_and_said(make: Callable[..., Any], expects_log: Callable[..., None]) -> None:
    expects_log("cannot serve this: clearing the storage")
    assert make().clear() is False


def test_wrong_settings_are_said_at_the_start(module: ModuleType, agent: ScriptedAgent) -> None:
    with pytest.raises(ValueError, match='"mount" is missing'):
        module.G35HiCache(HiCacheStorageConfig({"interface_v1": 1}))
    with pytest.raises(ValueError, match="no volume 'absent'"):
        module.G35HiCache(HiCacheStorageConfig({"g35": {"mount": "/nowhere", "volume": "absent"}}))
    assert agent.open_files == 0


def test_tensors_that_are_not_contiguous_are_stored_as_they_are(make: Callable[..., Any]) -> None:
    made = make()
    pages = [bytes(range(at, at + 50)) for at in range(4)]
    assert made.batch_set(KEYS[:4], [Transposed(page) for page in pages])
    rooms = [Tensor(bytes(50)) for _ in pages]
    assert made.batch_get(KEYS[:4], rooms) == rooms
    assert [bytes(room.memory) for room in rooms] == pages


def test_an_agent_that_hangs_does_not_hold_the_start(
    module: ModuleType, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), agent.open

    def held(path: str) -> int:
        assert go.wait(20)
        return real(path)

    monkeypatch.setattr(agent, "open", held)
    monkeypatch.setattr(named_values, "CHECK_SECONDS", 0.01)
    made = module.G35HiCache(config(), {})
    go.set()
    wait_until(lambda: made._values.agent_seen, 10)
    made.close()
    assert agent.open_files == 0
