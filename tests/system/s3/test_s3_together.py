"""Many clients on few keys: every answer is one value that somebody stored, whole."""

from __future__ import annotations

import random
import threading

from botocore.exceptions import ClientError

from tests.support.engines.s3_served import Served
from tests.support.waiting import wait_until

BUCKET = "blocks"
SIZES = (10, 70_000, 1 << 20, (2 << 20) + 5)


def value(number: int) -> bytes:
    """A value that tells in every part which one it is."""
    return f"{number:08}".encode() * (SIZES[number % len(SIZES)] // 8 + 1)


def work(s3: Served, seed: int, wrong: list[str], rounds: int = 25) -> None:
    client, dice = s3.client(), random.Random(seed)
    for turn in range(rounds):
        key = f"key {dice.randrange(3)}"
        match dice.randrange(4):
            case 0 | 1:
                client.put_object(Bucket=BUCKET, Key=key, Body=value(seed * 1000 + turn))
            case 2:
                try:
                    found = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
                except ClientError as refused:
                    if refused.response["Error"]["Code"] != "NoSuchKey":
                        wrong.append(str(refused))
                    continue
                if found != value(int(found[:8])):
                    wrong.append(f"{key}: {found[:8]!r} and something else")
            case 3:
                client.delete_object(Bucket=BUCKET, Key=key)
    client.close()


def test_what_many_read_and_write_at_once_is_always_one_whole_value(s3: Served) -> None:
    wrong: list[str] = []
    threads = [threading.Thread(target=work, args=(s3, seed, wrong)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client = s3.client()
    for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=each["Key"])
    wait_until(lambda: not s3.blocks["one"].blocks, what="all blocks to be freed")
    wait_until(lambda: s3.stores["one"].index.spare(9) == [], what="all names to be taken out")
    wait_until(lambda: s3.stores["one"].files.gauges().open_files == 0, what="all files to be closed")
