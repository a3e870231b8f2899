"""Whose blocks they are: what an agent asks its S3 door before it seals blocks anew or takes entries out."""

from __future__ import annotations

from pathlib import Path

from agent.pool.map.document import tenant_id
from tests.support.engines.s3_served import served

ONE, TWO = (bytes.fromhex(tenant_id(name)) for name in ("one", "two"))


def test_the_door_knows_whose_volumes_it_uses_and_which_blocks_objects_have(
    tmp_path: Path,
) -> None:
    nobodys = bytes(range(16))
    with served(tmp_path) as made:
        assert not made.door.holds_anything(ONE)
        made.client().put_object(Bucket="blocks", Key="a", Body=b"x" * 100_000)
        assert made.door.holds_anything(ONE)
        assert not made.door.holds_anything(TWO)
        blocks = list(made.blocks["one"].blocks)
        assert blocks
        assert made.door.orphans([*blocks, nobodys]) == [nobodys]
    assert list(made.door.orphans([*blocks, nobodys])) == [], "a closed door cannot tell"
