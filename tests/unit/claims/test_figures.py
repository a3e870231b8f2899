"""The table of figures: bytes of a token as kvcache-simulator has them, and a user's own records."""

from pathlib import Path

import pytest
from kvcache_sim.calculator import calculate_cache_size, load_models_data, models_by_id

from agent.errors import ConfigError, UserError
from agent.figures.tables import Figure, KvPrecision, find, load

BY_HAND = {"llama-3.1-405b": 126 * 8 * 128 * 2 * 2, "gpt-oss-120b": 18 * 8 * 64 * 2 * 2}
"""Models that the judge does not have, in bf16."""
PRECISIONS: tuple[tuple[KvPrecision, str], ...] = (("bf16", "bf16_fp16"), ("fp8", "fp8_int8"))


@pytest.mark.parametrize(("kv", "judged_as"), PRECISIONS)
def test_bytes_of_a_token_are_those_of_the_judge(kv: KvPrecision, judged_as: str) -> None:
    judge = models_by_id(load_models_data())
    for name, model in load().models.items():
        if name in BY_HAND:
            expected = BY_HAND[name] / (1 if kv == "bf16" else 2)
        else:
            expected = calculate_cache_size(judge[name], tokens=131_072, precision=judged_as).bytes_per_token
        assert model.bytes_per_token(kv) == expected, name


def test_each_model_names_the_file_that_it_was_read_from() -> None:
    assert all(model.source.startswith("huggingface.co/") for model in load().models.values())


def test_a_user_adds_a_model_and_replaces_a_pod(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    pod = load().pods["one"].model_dump()
    lines = ["[models.mine]", "kv_heads = 1", "head_dim = 64", "layers = [[2, 1]]", "heads = 2"]
    lines += ['source = "me"', 'date = "2026-11"', "[pods.one]", 'enclosure = "cmx"']
    for name in pod:
        if name != "enclosure":
            lines.append(f'{name} = {{ value = 7, source = "me", date = "2026-11-26" }}')
    file.write_text("\n".join(lines))
    tables = load(file)
    assert tables.models["mine"].bytes_per_token("bf16") == 2 * 2 * 64 * 2
    assert tables.pods["one"].gpus == Figure(value=7, source="me", date="2026-11-26")
    assert "llama-3.1-8b" in tables.models


GPU = (
    "[gpus.mine]\n"
    + "".join(
        f'{name} = {{ value = 1, source = "me", date = "2026-11" }}\n'
        for name in ("fp8_tflops", "memory_gb", "dram_gb", "watts")
    )
    + 'utilisation = { value = %s, source = "me", date = "%s" }\n'
)


MODEL = (
    '[models.x]\nkv_heads = 1\nhead_dim = 64\nheads = 2\nsource = "me"\ndate = "2026-11"\n'
    "layers = %s\nparameters = { total = 2, active = %s }\n"
)
RATE = (
    '[[rates]]\nmodel = "%s"\ngpu = "%s"\ncontext = 1\n'
    'tokens_s = { value = 1, source = "me", date = "2026-11" }\n'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gpu.x]\n", "unknown key gpu (did you mean gpus?)"),
        ("gpus = 1\n", "gpus should be a table of tables"),
        ("[gpus]\nx = 1\n", "[gpus.x] should be a table"),
        (GPU % (0, "2026-11"), "utilisation.value: should be greater than 0"),
        (GPU % ("1e-300", "2026-11"), "utilisation.value: should be at least 1e-09"),
        (GPU % (3, "2026-11"), "utilisation: a share is at most 1, not 3"),
        (MODEL % ("[[1, 1]]", 3), "a token uses 3 of 2 billion: active is more than all"),
        (MODEL % ("[[10, 200000]]", 1), "is not usable: layers.0.1: should be less than or equal to 4096"),
        (MODEL % ("[[10]]", 1), "is not usable: layers.0.1: is required"),
        (MODEL % ("[]", 1), "layers: should have 1 to 8 rows"),
        (RATE % ("llama-3.1-8b", "h10"), "a rate of the unknown GPU h10 (did you mean h100?)"),
        (RATE % ("lama-3.1-8b", "h100"), "a rate of the unknown model lama-3.1-8b (did you mean"),
        (GPU % (0.5, "today"), "utilisation.date: does not have the form"),
        (GPU % (0.5, "2026-99"), "utilisation.date: should be a month or a day of the calendar"),
        (GPU % (0.5, "2026-00"), "utilisation.date: should be a month or a day of the calendar"),
        (GPU % (0.5, "2026-02-30"), "utilisation.date: should be a month or a day of the calendar"),
        ('[models."a\\u001b[31mb"]\n', r"[models.a\x1b[31mb]: a name has 1 to 80 printable characters"),
        ('[models.""]\n', "[models.]: a name has 1 to 80 printable characters"),
        (f"[gpus.{'k' * 100_000}]\n", f"[gpus.{'k' * 80}... (100,000 characters)]: a name has"),
        (f"{'k' * 100_000} = 1\n", f"unknown key {'k' * 80}... (100,000 characters)"),
        (f"[models.x]\n{'k' * 100_000} = 1\n", f"; {'k' * 80}... (100,000 characters): unknown key"),
        ('[models.x]\n"\\u001b" = 1\n', r"; \x1b: unknown key"),
        (RATE % (r"\u001b", "h100"), r"a rate of the unknown model \x1b"),
        (
            '[models.x]\nsource = "\\u001b[2J"\n',
            "source: should have printable characters alone, in one line",
        ),
        (GPU % (0.5, "2026-11") + "colour = 1\n", "colour: unknown key"),
        ("[[rates]]\nmodel = 'x'\n", "rate 1 is not usable"),
        (
            "[models.x]\nsource='me'\ndate='2026-11'\nlayers=[[1,1]]\nheads=1\n",
            "either kv_heads and head_dim, or",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_reason(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert words in str(refused.value)


def test_a_pod_of_no_enclosures_and_one_of_unknown_enclosures_are_refused(tmp_path: Path) -> None:
    figures = "".join(
        f'{name} = {{ value = 1, source = "me", date = "2026-11" }}\n'
        for name in (
            "gpus", "gpus_per_host", "host_nic_gb_s", "host_dpu_watts", "g4_gb_s", "g4_watts_per_gb_s"
        )
    )  # fmt: skip
    file = tmp_path / "mine.toml"
    for count, kind, words in (
        (0, "cmx", "enclosures.value: should be greater than 0"),
        (0.25, "cmx", "enclosures: a count is a whole number, not 0.25"),
        (1, "cmxx", "unknown enclosures cmxx (did you mean cmx?)"),
    ):
        file.write_text(
            f'[pods.mine]\nenclosure = "{kind}"\n{figures}'
            f'enclosures = {{ value = {count}, source = "me", date = "2026-11" }}\n'
        )
        with pytest.raises(ConfigError) as refused:
            load(file)
        assert words in str(refused.value)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no GPU 'gb20' \(did you mean gb200\?\)"):
        find("GPU", "gb20", load().gpus)
