"""Queries as bytes: what is understood, and what is refused without harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pool.counters import MissCause
from agent.pool.read.leading_run import LeadingRun
from agent.query.query_json import KEYS_MAX, BadQuery, Query, answer_for, decode_query_untrusted
from host_shim.control_wire import NameForm, key_of_long_name, name_of

KEY, OTHER = bytes(range(16)), bytes(range(16, 32))


def decoded(**document: Any) -> Query:
    return decode_query_untrusted(json.dumps({"volume": "kv", **document}).encode())


def refused(body: bytes) -> BadQuery:
    with pytest.raises(BadQuery) as found:
        decode_query_untrusted(body)
    return found.value


def test_prompts_are_lists_of_keys_or_one_text_of_their_digits() -> None:
    assert decoded(prompts=[[KEY.hex(), OTHER.hex()], [OTHER.hex()]]).prompts == [KEY + OTHER, OTHER]
    assert decoded(prompts=[(KEY + OTHER).hex()]).prompts == [KEY + OTHER]
    assert decoded(prompts=[[], ""]).prompts == [b"", b""]


def test_hashes_of_an_engine_become_the_keys_of_its_connector() -> None:
    block = bytes(range(32))
    form = NameForm(name_of("vllm", b"layout"), tail=bytes(4))
    name = name_of("vllm", b"layout", block + bytes(4))
    assert form.name(block) == name
    assert decoded(prompts=[[block.hex()]], names=form.describe()).prompts == [key_of_long_name(name)]
    page = NameForm(name_of("sglang"), name_of("kv", 64), is_text=True)
    name = name_of("sglang", block.hex(), "kv", 64)
    assert decoded(prompts=[[block.hex()]], names=page.describe()).prompts == [key_of_long_name(name)]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff\xfe", b"[]", b"1", b"null", b"[" * 100_000, b'{"volume": "kv"}', b'{"prompts": [[]]}',
        b'{"volume": "", "prompts": [[]]}', b'{"volume": 1, "prompts": [[]]}',
        b'{"volume": "kv", "prompts": []}', b'{"volume": "kv", "prompts": {}}',
        b'{"volume": "kv", "prompts": [1]}', b'{"volume": "kv", "prompts": [["zz"]]}',
        b'{"volume": "kv", "prompts": [["00"]]}', b'{"volume": "kv", "prompts": ["00"]}',
        b'{"volume": "kv", "prompts": [["%s"]]}' % b" ".join([b"00"] * 11),
        b'{"volume": "kv", "prompts": ["%s"]}' % b" ".join([b"00"] * 16),
        b'{"volume": "kv", "prompts": [[null]]}', b'{"volume": "kv", "prompts": [[]], "more": 1}',
        b'{"volume": "kv", "prompts": [[]], "names": 1}',
        b'{"volume": "kv", "prompts": [[]], "names": {"x": 1}}',
        b'{"volume": "kv", "prompts": [[]], "names": {"before": "z"}}',
        b'{"volume": "kv", "prompts": [[]], "names": {"text": 1}}',
        b'{"volume": "kv", "prompts": [[""]], "names": {}}',
        b'{"volume": "kv", "prompts": [""], "names": {}}',
    ],
)  # fmt: skip
def test_what_is_no_query_is_refused(body: bytes) -> None:
    assert refused(body).status == 400


def test_a_field_that_is_unknown_is_named() -> None:
    asked = {"volume": "kv", "prompts": [[]], "prompt": 1}
    assert refused(json.dumps(asked).encode()).why.startswith("'prompt' is no field of a query")
    assert len(refused(json.dumps(asked | {"\n" * 10_000: 1}).encode()).why) < 200
    long = refused(json.dumps({"x" * 100_000: 1}).encode()).why
    assert len(long) < 200


def test_more_keys_than_a_request_may_have_are_refused_whatever_their_form() -> None:
    many = KEYS_MAX + 1
    for prompts in ([[KEY.hex()] * many], [KEY.hex() * many], [[KEY.hex()] * KEYS_MAX, [KEY.hex()]]):
        body = json.dumps({"volume": "kv", "prompts": prompts}).encode()
        assert refused(body).status == 413
    assert decoded(prompts=[KEY.hex() * KEYS_MAX]).key_count == KEYS_MAX


NAMES = st.sampled_from(["volume", "prompts", "names", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(ANYTHING)
def test_any_json_is_a_query_or_refused(document: Any) -> None:
    status = 200
    try:
        decode_query_untrusted(json.dumps(document).encode())
    except BadQuery as bad:
        status = bad.status
    assert status in (200, 400, 413)


def test_an_answer_tells_the_run_its_tiers_its_time_and_the_hole() -> None:
    run = LeadingRun()
    run.add_from_memory(100)
    run.add_from_flash(200, 2)
    run.in_g4, run.g4_bytes = 1, 50
    run.hole = MissCause.EVICTED
    assert answer_for(KEY * 5, run, 0.0125, None) == {
        "keys": 5, "run": 4, "memory": 1, "flash": 2, "g4": 1, "bytes": 550, "load_ms": 12.5,
        "compute_ms": None, "hole": {"at": 4, "cause": "evicted"},
    }  # fmt: skip
