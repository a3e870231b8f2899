"""Somebody without the root key writes pool maps to the drive of one enclosure, while processes serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.inline.secrets import RootKey, SecretKey, root_key_in
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import COPY_BYTES
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.superblock import COPY_OFFSETS, Superblock, decode_superblock_untrusted
from host_shim.pool import Pool
from tests.support.pool.two_tenants import KEYS, TENANTS, TwoTenants, value_of
from tests.support.pool_up import wait_each_served
from tests.support.waiting import wait_until


class Attacker:
    """Writes to the drive of the second enclosure, which is killed for that and started again."""

    def __init__(self, tenants: TwoTenants) -> None:
        self._tenants = tenants
        (self._file,) = _media(tenants.folder / "d1")
        self.nguid = self.copies()[0].nguid.hex()

    def copies(self, number: int = 1) -> list[Superblock]:
        (file,) = _media(self._tenants.folder / f"d{number}")
        with file.open("rb") as drive:
            found = []
            for offset in COPY_OFFSETS:
                drive.seek(offset)
                found.append(decode_superblock_untrusted(drive.read(COPY_BYTES)))
        return found

    def write(self, pool_map: PoolMap) -> None:
        data = Superblock(bytes.fromhex(self.nguid), pool_map).encode()
        self._tenants.enclosures[1].kill()
        with self._file.open("r+b") as drive:
            for offset in COPY_OFFSETS:
                drive.seek(offset)
                drive.write(data)
        self._tenants.restart(1)

    def erased(self, pool_map: PoolMap) -> PoolMap:
        tenants = [each.model_copy(update={"wrapped_key": ""}) for each in pool_map.tenants]
        return pool_map.model_copy(update={"version": pool_map.version + 3, "tenants": tuple(tenants)})

    def emptied(self, pool_map: PoolMap) -> PoolMap:
        """Without a volume of red's, and with a quota by which blue loses all but one value."""
        volumes = [each for each in pool_map.volumes if each.name != "red"]
        tenants = [each.model_copy(update={"quota_slots": 1, "bandwidth": 1}) for each in pool_map.tenants]
        update = {"version": pool_map.version + 5, "volumes": tuple(volumes), "tenants": tuple(tenants)}
        return pool_map.model_copy(update=update)


def _media(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.stat().st_size > 1 << 20]


def contested(mount: Path) -> dict[str, str]:
    found: dict[str, Any] = json.loads((mount / ".g35/status.json").read_text())
    said: dict[str, str] = found["pool"]["contested"]
    return said


def wait_whole(pool: Pool, *names: str) -> None:
    """Each worker connects anew to an enclosure that was away, and what it asks there first may miss."""
    for name in names:
        wait_each_served(pool.volume(name), {key: value_of(name, key) for key in KEYS})


@pytest.mark.timeout(600)  # a dozen processes start in it, one after another
def test_a_forged_copy_takes_nothing_and_is_written_over(two_tenants: TwoTenants) -> None:
    attacker, mount = Attacker(two_tenants), two_tenants.mount
    seal = MapSeal(root_key_in(two_tenants.folder / "root.key"))
    agent = two_tenants.serve()
    first = two_tenants.pool_map()
    assert seal.holds(first)
    with Pool(mount) as pool:
        for name in TENANTS:
            for key in KEYS:
                assert pool.volume(name).put(key, value_of(name, key))

        for forge in (attacker.erased, attacker.emptied):
            attacker.write(forge(two_tenants.pool_map()))
            wait_until(lambda: "seal" in contested(mount).get(attacker.nguid, ""), 30, "the agent to see it")
            wait_whole(pool, *TENANTS)
        # A verb goes on from the pool's own map, and writes it over the other.
        code, said = two_tenants.tenant("set", "red", "--quota-slots", "100")
        assert code == 0, said
        limited = two_tenants.pool_map()
        assert [each.quota_slots for each in limited.tenants if each.name == "red"] == [100]
        assert len(limited.volumes) == len(first.volumes)
        assert [each.pool_map for each in attacker.copies()] == [limited] * 2
        wait_until(lambda: not contested(mount), 30, "the agent to see that")
        wait_whole(pool, *TENANTS)

    # An agent that is killed starts by the pool's own map, and where the enclosure plays the past back, too.
    attacker.write(attacker.emptied(limited))
    agent.process.kill()
    agent.process.wait(30)
    agent = two_tenants.serve()
    with Pool(mount) as pool:
        wait_whole(pool, *TENANTS)
        code, said = two_tenants.tenant("erase", "blue", "--yes")
        assert code == 0, said
        wait_until(lambda: pool.volume("blue").get(KEYS[0]) is None, 20, "the agent to notice")
    agent.process.kill()
    agent.process.wait(30)
    members = [(bytes.fromhex(attacker.nguid), 24 << 20)]
    wish = VolumeWish(name="theirs", value_bytes=1 << 16, share=0.5)
    other = plan_pool(members, [wish], RootKey(SecretKey(bytes(32)), "a stranger's"))
    attacker.write(other)
    agent = two_tenants.serve()
    said = contested(mount)[attacker.nguid]
    assert f"carries pool {other.pool_id} now; nothing is written there" in said, "from the start on"
    agent.process.kill()
    agent.process.wait(30)
    attacker.write(first)
    two_tenants.configure("[pool]", 'membership = "auto"')
    agent = two_tenants.serve()
    with Pool(mount) as pool:
        assert "blue" not in [each["name"] for each in pool.stats()["volumes"]]
        wait_whole(pool, "red")
        # It mends copies that differ, by the map that is the pool's own.
        erased = two_tenants.pool_map()
        for forge in (None, attacker.emptied, attacker.erased):
            if forge is not None:
                attacker.write(forge(erased))
            wait_until(lambda: attacker.copies()[1].pool_map == erased, 90, "the agent to mend it")
            assert [each.pool_map for each in (*attacker.copies(), *attacker.copies(0))] == [erased] * 4
        wait_whole(pool, "red")
    assert agent.stop(30) == 0
