"""A profile's sums, records and tables, of usage that is made up here."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from agent.bench import profile_records
from agent.bench.names_and_units import CATALOG
from agent.bench.processor_profile import OTHERS, PROFILED, Profile, Share, can_profile, shares
from agent.bench.processor_time import Usage
from tests.support.verbs_here import status_of

USAGE = {
    "client": {"bench": Usage(4, 0.1, 0.0, 0.2), "main": Usage(1, 0.0, 0.0, 0.0)},
    "agent": {
        "fuse": Usage(2, 1.0, 0.4, 0.5),
        "upkeep": Usage(1, 0.2, 0.1, 0.0),
        "prestage": Usage(2, 0.0001, 0.0, 0.0),
        "accept": Usage(1, 0.0001, 0.0, 0.0),
    },
    "enclosure": {},
}


def profiled() -> Profile:
    return Profile(CATALOG["kv_get_1m"], 1000, 2.0, shares(USAGE, 1000, 2.0, 0.25))


def test_a_process_is_the_sum_of_its_threads_and_the_cipher_is_of_the_agents_busiest() -> None:
    (client, _), (agent, kinds), (enclosure, none) = profiled().processes
    assert [kind.name for kind in kinds] == ["fuse", "upkeep", OTHERS]
    fuse, upkeep, others = kinds
    assert (fuse.threads, upkeep.threads, others.threads, agent.threads) == (2, 1, 3, 6)
    assert fuse.lock == pytest.approx(350)  # 0.6 s of user time, of which the cipher has 0.25
    assert fuse.cipher == pytest.approx(250)
    assert fuse.kernel == pytest.approx(400)
    assert fuse.queue == pytest.approx(500)
    assert fuse.waiting == pytest.approx(2500)  # two threads for two seconds, less 1.0 and 0.5
    assert upkeep.cipher == others.cipher == client.cipher == 0
    assert agent.processor == pytest.approx(1200.2)
    assert (enclosure.processor, enclosure.threads, list(none)) == (0, 0, [])


def test_a_cipher_is_never_more_than_the_user_time() -> None:
    (_, (fuse, *_)) = shares({"agent": {"fuse": Usage(1, 1.0, 0.5, 0.0)}}, 1000, 2.0, 0.75)[0]
    assert (fuse.lock, fuse.cipher) == (0, 500)


def test_nobody_waits_less_than_no_time() -> None:
    (_, (fuse,)) = shares({"agent": {"fuse": Usage(1, 2.1, 0.0, 0.2)}}, 1000, 2.0, 0.0)[0]
    assert fuse.waiting == 0


def test_the_record_has_what_the_table_has(tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    profile_records.write(target, [profiled()])
    (record,) = profile_records.records([profiled()])
    assert record["processor_us"] == pytest.approx(1300.2)
    agent = record["processes"][1]
    assert (agent["process"], agent["kinds"][0]["kind"]) == ("agent", "fuse")
    assert agent["kinds"][0]["cipher_us"] == 250
    console = Console(width=120)
    with console.capture() as capture:
        console.print(profile_records.table(profiled()))
    text = capture.get()
    assert "kv_get_1m: 1,300.2 us of processor a value, 1,000 values" in text
    rows = {line.split("  ")[0]: line.split()[-7:] for line in text.splitlines() if line}
    assert rows["- fuse"] == ["2", "350.0", "250.0", "400.0", "1,000.0", "500.0", "2,500.0"]
    assert rows["agent"][0] == "6"


def test_a_process_with_one_kind_of_thread_is_one_row() -> None:
    only = Share("host", 1, 1.0, 0.0, 0.0, 0.0, 0.0)
    profile = Profile(CATALOG["kv_get_1m"], 1, 1.0, [(only, [only])])
    assert profile_records.table(profile).row_count == 1


def test_names_that_are_profiled_without_being_asked_for_can_be() -> None:
    assert all(can_profile(CATALOG[name]) for name in PROFILED)


def test_a_name_whose_client_is_another_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("bench", "--profile", "mooncake_get_1m_x4") == 2
    assert "cannot be profiled" in capsys.readouterr().err
