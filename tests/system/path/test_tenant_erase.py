"""A tenant is erased under a serving agent; the drives are then searched with every key that is left."""

from __future__ import annotations

import os
from typing import Any

import pytest

from agent.inline.cipher_suites import Place
from agent.inline.secrets import Purpose, RootKey, SecretKey, WrongKey, root_key_in
from agent.pool.format.sealed_slot import HEADER_BYTES, MAGIC, OpenSlot, SlotCodec
from agent.pool.map.document import PoolMap
from host_shim.control_wire import Outcome
from host_shim.pool import Pool, UnknownVolume
from tests.support.pool.two_tenants import KEYS, TENANTS, TwoTenants, value_of
from tests.support.waiting import wait_until


def opened_with_what_is_left(pool_map: PoolMap, root: RootKey, media: list[bytes]) -> dict[str, int]:
    """Every slot on the media, tried with the secret of each volume that any key still opens: how many
    values of `KEYS` opened, by the volume that they say they are of; and how many slots there are."""
    secrets: list[SecretKey] = []
    for volume in pool_map.volumes:
        context = bytes.fromhex(pool_map.pool_id + volume.volume_id)
        if not pool_map.is_erased(volume):
            secrets.append(pool_map.secret(volume, root))
        with pytest.raises(WrongKey):
            root.unwrap(Purpose.VOLUME, context, bytes.fromhex(volume.wrapped_secret))
    counts = dict.fromkeys([*(volume.name for volume in pool_map.volumes), "slots"], 0)
    for drive in media:
        at = drive.find(MAGIC)
        while at >= 0:
            counts["slots"] += 1
            header = memoryview(drive)[at : at + HEADER_BYTES]
            for secret in secrets:
                for volume in pool_map.volumes:
                    codec = SlotCodec(
                        bytes.fromhex(volume.tenant), bytes.fromhex(volume.volume_id),
                        SecretKey(secret.reveal()[32:]), volume.suite, volume.unit_bytes,
                    )  # fmt: skip
                    found = (codec.open(header, key, Place(bytes(16), 0)) for key in KEYS)
                    counts[volume.name] += sum(isinstance(each, OpenSlot) for each in found)
            at = drive.find(MAGIC, at + 1)
    return counts


def test_erase_under_a_serving_agent(two_tenants: TwoTenants) -> None:
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        for name in TENANTS:
            for key in KEYS:
                assert pool.volume(name).put(key, value_of(name, key))
        before, root = two_tenants.pool_map(), root_key_in(two_tenants.folder / "root.key")
        wrapped = next(each.wrapped_key for each in before.tenants if each.name == "blue").encode()
        assert all(drive.count(wrapped) == 2 for drive in two_tenants.drives())
        counts = opened_with_what_is_left(before, root, two_tenants.drives())
        assert counts["blue"] == counts["red"] == len(KEYS)

        name = two_tenants.mount / "kv/blue" / KEYS[0].hex()
        with name.open("rb", buffering=0) as half_read:
            assert half_read.read(100)
            assert two_tenants.tenant("erase", "blue")[0] == 1, "not without --yes"
            code, said = two_tenants.tenant("erase", "blue", "--yes")
            assert code == 0, said
            wait_until(lambda: erased(pool), 20, "the agent to notice")
            with pytest.raises(OSError):
                half_read.read(100)
        assert [pool.volume("red").get(key) for key in KEYS] == [value_of("red", key) for key in KEYS]
        assert [each["name"] for each in pool.stats()["volumes"]] == ["red", "green"]
        assert sorted(os.listdir(two_tenants.mount / "kv")) == ["green", "red"]
        with pytest.raises(OSError):
            (two_tenants.mount / "kv/blue/new").write_bytes(b"x")

    after, media = two_tenants.pool_map(), two_tenants.drives()
    assert after.version == before.version + 1
    assert not any(
        wrapped[at : at + 40] in drive for drive in media for at in range(0, len(wrapped) - 40, 20)
    )
    counts = opened_with_what_is_left(after, root, media)
    assert (counts["blue"], counts["red"]) == (0, len(KEYS))
    assert counts["slots"] >= 2 * len(KEYS), "they are all there, and open for nobody"
    assert two_tenants.listed() == {"blue": "erased", "green": "its own", "red": "its own"}
    assert agent.stop(30) == 0
    assert "volume blue was erased" in agent.output

    # Back with a fresh key: the same place, nothing of what was. And somebody new.
    two_tenants.configure(more="violet")
    for name in ("blue", "violet"):
        code, said = two_tenants.tenant("add", name)
        assert code == 0, said
        assert "1 new volume(s)" in said
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        assert [pool.volume("blue").get(key) for key in KEYS] == [None] * len(KEYS)
        assert pool.volume("blue").put(KEYS[0], b"new")
        assert pool.volume("blue").get(KEYS[0]) == b"new"
        assert pool.volume("violet").put(KEYS[0], b"violet's")
        assert pool.volume("red").get(KEYS[1]) == value_of("red", KEYS[1])
    assert agent.stop(30) == 0


def erased(pool: Pool) -> bool:
    """As a client sees it to which the volume was served: a miss, with its cause, by every call."""
    blue, buffer = pool.volume("blue"), bytearray(1 << 16)
    if blue.lookup(KEYS[:1]) != [Outcome.WRONG_KEY]:
        return False
    assert [blue.get(key) for key in KEYS[:2]] == [None, None]
    assert blue.get_into(KEYS[0], buffer) is blue.get_into(KEYS[0], bytearray(1 << 20)) is None
    (fetched,) = blue.fetch(KEYS[:1], [buffer])
    assert (fetched.length, fetched.outcome) == (None, Outcome.WRONG_KEY)
    assert not any(
        [*blue.exists(KEYS), *blue.put_many(KEYS[:2], [b"new", b"newer"]), blue.put(KEYS[0], b"new")]
    )
    assert not any([*blue.prestage(KEYS), *blue.pin(KEYS), *blue.delete(KEYS), blue.longest_prefix(KEYS)])
    assert blue.stats() == {}
    return True


def test_an_enclosure_that_is_away_is_named_and_the_mount_is_one_tenants(two_tenants: TwoTenants) -> None:
    away = two_tenants.enclosures[1]
    away.stop()
    code, said = two_tenants.tenant("erase", "blue", "--yes")
    assert code == 1
    assert "1 of 2 namespaces may still hold the key of tenant blue" in said
    assert "not reached" in said
    assert any(each.nguid in said for each in two_tenants.pool_map().namespaces)
    two_tenants.restart(1)
    code, said = two_tenants.tenant("erase", "blue", "--yes")
    assert code == 0, said
    assert two_tenants.tenant("erase", "nobody", "--yes")[0] == 1

    # The agent starts without the erased tenant, and shows the mount's own tenants and nothing else.
    two_tenants.configure('tenants = ["blue", "red"]')
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        assert pool.volume("red").put(KEYS[0], b"of red")
        for name in ("blue", "green", "grey"):
            with pytest.raises(UnknownVolume):
                pool.volume(name).exists(KEYS[:1])
        found: dict[str, Any] = pool.stats()
        assert [each["name"] for each in found["volumes"]] == ["red"]
        assert found["memory"] is None
    assert os.listdir(two_tenants.mount / "kv") == ["red"]
    assert two_tenants.g35("status", "--mount", str(two_tenants.mount))[0] == 0
    assert agent.stop(30) == 0
