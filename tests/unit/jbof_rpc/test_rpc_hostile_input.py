"""Whatever is sent to the RPC socket: values are cut right or the stream ends, and no request is a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rpc.dispatch import BATCH_MAX, Dispatcher
from emulator.jbof.rpc.json_stream import MESSAGE_BYTES_MAX, NESTING_MAX, JsonStream, MalformedStream

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=12)
    | st.floats(allow_nan=False, allow_infinity=False)
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_CONTAINERS = st.lists(_JSON, max_size=4) | st.dictionaries(st.text(max_size=6), _JSON, max_size=4)


@given(values=st.lists(_CONTAINERS, max_size=4), data=st.data(), ascii_only=st.booleans())
def test_values_come_out_as_they_went_in_wherever_they_are_cut(
    values: list[Any], data: st.DataObject, ascii_only: bool
) -> None:
    gaps = data.draw(st.lists(st.sampled_from(["", "\n", " \t"]), min_size=len(values), max_size=len(values)))
    text = "".join(
        json.dumps(value, ensure_ascii=ascii_only) + gap for value, gap in zip(values, gaps, strict=True)
    )
    raw = text.encode("utf-8", "surrogatepass" if ascii_only else "strict")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    stream, found = JsonStream(), list[Any]()
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += stream.push(raw[start:end])
    assert found == values


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_bytes_that_are_nothing_raise_one_exception_only(pieces: list[bytes]) -> None:
    stream = JsonStream()
    try:
        for piece in pieces:
            stream.push(piece)
    except MalformedStream:
        pass


@pytest.mark.parametrize(
    "raw",
    [
        b"{bad json}", b"7", b'"text"', b"null", b"}", b"{]", b'{"a":NaN}', b'{"a":\xff}', b"{}x",
        b"[" * (NESTING_MAX + 1), b'{"n":' + b"9" * 5000 + b"}", b'{"a":"\x00"}',
    ],
)  # fmt: skip
def test_what_is_not_json_ends_the_stream(raw: bytes) -> None:
    with pytest.raises(MalformedStream):
        JsonStream().push(raw)


def test_a_message_without_end_is_bounded() -> None:
    stream = JsonStream()
    assert stream.push(b'{"params":"') == []
    piece = b"x" * (64 << 10)
    for _ in range(MESSAGE_BYTES_MAX // len(piece) - 1):
        assert stream.push(piece) == []
    with pytest.raises(MalformedStream, match="more than"):
        stream.push(piece)


def test_a_batch_is_bounded() -> None:
    with Enclosure(EnclosureSettings(bare=True)) as enclosure:
        said = Dispatcher(enclosure).answer([{"id": 1, "method": "rpc_get_methods"}] * (BATCH_MAX + 1))
    assert isinstance(said, dict)
    assert said["error"]["code"] == -32600


# Not files, transports and listeners: those touch the machine.
_SAFE = [
    "bdev_malloc_delete", "bdev_get_bdevs", "bdev_get_iostat", "keyring_file_remove_key", "keyring_get_keys",
    "nvmf_create_subsystem", "nvmf_delete_subsystem", "nvmf_get_subsystems", "nvmf_subsystem_add_host",
    "nvmf_subsystem_add_ns", "nvmf_subsystem_remove_ns", "nvmf_subsystem_allow_any_host",
    "nvmf_subsystem_set_keys", "nvmf_subsystem_remove_host", "nvmf_subsystem_remove_listener", "nothing",
]  # fmt: skip
_NAMES = [
    "nqn", "name", "names", "nsid", "host", "namespace", "bdev_name", "allow_any_host", "dhchap_key", "uuid",
    "listen_address", "nguid", "serial_number", "max_namespaces",
]  # fmt: skip
_VALUES = st.sampled_from(
    ["nqn.2026-01.io.g35:known", "Malloc0", "nqn.h", 1, 0, -1, 1 << 70, True, "é\ud800"]
)
_PARAMS = st.dictionaries(
    st.sampled_from(_NAMES),
    _VALUES | _JSON | st.dictionaries(st.sampled_from(_NAMES), _VALUES | _JSON, max_size=4),
    max_size=5,
)


@given(st.lists(st.tuples(st.sampled_from(_SAFE), _PARAMS), max_size=8), st.lists(_JSON, max_size=3))
def test_requests_of_any_shape_are_answered_or_refused(
    calls: list[tuple[str, dict[str, Any]]], others: list[Any]
) -> None:
    """An exception inside would be logged, and a log line fails the test."""
    with Enclosure(EnclosureSettings(bare=True)) as enclosure:
        dispatcher = Dispatcher(enclosure)
        dispatcher.answer(
            [
                {"id": 1, "method": "bdev_malloc_create", "params": {"block_size": 512, "num_blocks": 8}},
                {"id": 2, "method": "nvmf_create_subsystem", "params": {"nqn": "nqn.2026-01.io.g35:known"}},
            ]
        )
        for method, params in calls:
            said = dispatcher.answer({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
            json.dumps(said)
            assert isinstance(said, dict)
            assert ("result" in said) != ("error" in said)
        for each in others:
            json.dumps(dispatcher.answer(each))
