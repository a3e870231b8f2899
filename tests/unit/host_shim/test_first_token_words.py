"""What first_token.py says and when it says nothing; the model itself needs torch (tests/system/engines)."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from host_shim.first_token import CannotSay, Row, _options, break_even, chained_keys, main, run, table
from host_shim.llama_shape import SHAPES
from host_shim.pool import Volume

NO_TORCH = SimpleNamespace(
    float32=SimpleNamespace(itemsize=4),
    inference_mode=contextlib.nullcontext,
    cuda=SimpleNamespace(is_available=lambda: False),
)
"""What is asked of torch before a model is made."""


def row(tokens: int, recomputed: float, restored: float) -> Row:
    return Row(tokens, tokens << 16, recomputed, restored, restored / 2, 0.0)


def test_where_restoring_begins_to_pay() -> None:
    assert break_even([]) is None
    assert break_even([row(256, 1.0, 2.0), row(512, 2.0, 3.0)]) is None
    assert break_even([row(256, 2.0, 1.0), row(512, 4.0, 1.0)]) == 256
    # One second lost at 256, three gained at 512: a quarter of the way.
    assert break_even([row(512, 5.0, 2.0), row(256, 1.0, 2.0)]) == 320


def test_a_length_at_which_it_paid_by_chance_does_not_count() -> None:
    rows = [row(128, 2.0, 1.0), row(256, 1.0, 2.0), row(512, 3.0, 2.0)]
    assert break_even(rows) == 384
    assert break_even([row(128, 2.0, 1.0), row(256, 2.0, 2.0)]) is None


def test_the_table_has_a_line_for_each_length() -> None:
    lines = table([row(256, 1.0, 2.0), row(512, 5.0, 2.0)]).splitlines()
    assert [line.split()[0] for line in lines] == ["prefix", "256", "512", "restoring"]
    assert lines[-1] == "restoring pays from 320 tokens on"
    assert table([row(256, 1.0, 2.0)]).endswith("restoring never pays here")


def test_keys_cover_all_that_is_before() -> None:
    tokens = list(range(64))
    keys = chained_keys("model", tokens, 16)
    assert [len(key) for key in keys] == [16] * 4
    assert chained_keys("model", tokens[:40], 16) == keys[:2]
    assert not set(chained_keys("another", tokens, 16)) & set(keys)
    for at in range(64):
        other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
        differ = [one != two for one, two in zip(chained_keys("model", other, 16), keys, strict=True)]
        assert differ == [number >= at // 16 for number in range(4)]


def test_the_sizes_of_blocks() -> None:
    assert SHAPES["8b"].block_bytes(16, 2) == 2 << 20
    assert SHAPES["1b"].block_bytes(16, 2) == 512 << 10
    for shape, (tokens, element) in itertools.product(SHAPES.values(), [(16, 2), (32, 4)]):
        assert shape.block_bytes(tokens, element) % 512 == 0
        assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize(
    "words",
    [["--lengths", "100"], ["--lengths", "0"], ["--lengths", "x"], ["--rounds", "0"], ["--model", "70b"]],
)
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--mount", "/nowhere", *words])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_without_torch_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["--mount", "/nowhere"]) == 1
    assert "torch is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "there is no agent behind"),
        (["--device", "cuda:1", "--dtype", "float32"], "torch finds no cuda:1"),
    ],
)
def test_without_a_pool_or_a_device_it_says_so(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(CannotSay, match=why):
        run(NO_TORCH, _options(["--mount", str(tmp_path), *words]))


def test_a_block_that_no_slot_holds_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Volume, "stats", lambda self: {"value_bytes": 65536})
    with pytest.raises(CannotSay, match="a block has 131072 bytes and a slot of volume kv holds 65536"):
        run(NO_TORCH, _options(["--mount", str(tmp_path), "--block-tokens", "64"]))
