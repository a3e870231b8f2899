"""Quotas, bandwidth and key rotation by the verbs, under an agent that serves."""

from __future__ import annotations

import threading

from agent.pool.format.sealed_slot import MAGIC
from host_shim.block_key import key_of
from host_shim.pool import Pool
from tests.support.pool.two_tenants import KEYS, TwoTenants, value_of
from tests.support.waiting import wait_until


def fingerprints(two_tenants: TwoTenants) -> set[bytes]:
    """Of all slots on the media that are whole, those that nobody names among them."""
    found = set()
    for drive in two_tenants.drives():
        at = drive.find(MAGIC)
        while at >= 0:
            found.add(drive[at + 16 : at + 24])
            at = drive.find(MAGIC, at + 1)
    return found


def test_limits_and_rotation_under_a_serving_agent(two_tenants: TwoTenants) -> None:
    assert two_tenants.tenant("set", "blue")[0] == 1, "nothing to set"
    assert two_tenants.tenant("set", "blue", "--quota-bytes", "a lot")[0] == 2
    code, said = two_tenants.tenant("set", "blue", "--quota-slots", "20", "--bandwidth", "500M")
    assert code == 0, said
    agent = two_tenants.serve()
    with Pool(two_tenants.mount) as pool:
        blue, red = pool.volume("blue"), pool.volume("red")
        for number in range(30):
            assert blue.put(key_of(f"blue {number}"), value_of("blue", KEYS[0]))
        for key in KEYS:
            assert red.put(key, value_of("red", key))
        tenants = {row["name"]: row for row in pool.stats()["tenants"]}
        assert tenants["blue"]["slots_known_taken"] == tenants["blue"]["slots_max"] == 20
        assert tenants["blue"]["quota_evictions"] == 10
        assert tenants["red"]["slots_known_taken"] == len(KEYS)

        # Lowered while it serves.
        code, said = two_tenants.tenant("set", "blue", "--quota-slots", "8")
        assert code == 1, "it holds 20, and would lose 12"
        code, said = two_tenants.tenant("set", "blue", "--quota-slots", "8", "--yes")
        assert code == 0, said
        wait_until(lambda: taken(pool) == 8, 20, "blue to shrink to its quota")
        assert sum(blue.get(key_of(f"blue {number}")) is not None for number in range(30)) == 8

        # Red's keys are rotated, and somebody reads all the time.
        before, got, stop = fingerprints(two_tenants), list[tuple[bytes, bytes | None]](), threading.Event()

        def read_on() -> None:
            with Pool(two_tenants.mount) as own:
                volume = own.volume("red")
                while not stop.is_set():
                    got.extend((key, volume.get(key)) for key in KEYS)
                    stop.wait(0.05)

        reader = threading.Thread(target=read_on)
        reader.start()
        try:
            code, said = two_tenants.tenant("rotate", "red", "--wait", "60")
            assert code == 0, said
            assert "nothing is left under them" in said
        finally:
            stop.set()
            reader.join(30)
        misses = sum(value is None for _, value in got)
        assert all(value in (None, value_of("red", key)) for key, value in got), "never a wrong byte"
        assert misses <= len(got) / 20, f"{misses} of {len(got)}: the machine was too busy for the deadline"
        assert red.put(key_of("later"), b"under the new key")
        assert len(fingerprints(two_tenants) - before) == 1
        rotated = next(each for each in two_tenants.pool_map().volumes if each.name == "red")
        assert (rotated.key_epoch, rotated.earlier_secret) == (1, "")
        keys = next(row["keys"] for row in pool.stats()["volumes"] if row["name"] == "red")
        assert keys["resealed"] == len(KEYS)
    assert agent.stop(30) == 0


def taken(pool: Pool) -> int:
    count = next(row["slots_known_taken"] for row in pool.stats()["tenants"] if row["name"] == "blue")
    assert isinstance(count, int)
    return count
