"""The tables of docs/claims.md, made from what `g35 claims` computes, and its plots.

    python -m tests.support.rungs.claims_page            the tables, in a second
    python -m tests.support.rungs.claims_page --plots    the trace's table and the plots too, in minutes

A table stands between `<!-- made: NAME -->` and `<!-- end -->`.
tests/unit/claims/test_claims_page.py compares.
"""

import lzma
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.claims.equations import whole_gpu
from agent.claims.plots import draw_all
from agent.claims.report import WAYS, Answer, answer
from agent.claims.scenario import Choice, Scenario, scenario_of
from agent.claims.trace import read_trace
from agent.claims.verdicts import STATED_HIT_SHARES, STATED_PREFILL_SHARES
from agent.figures.tables import KvPrecision, load

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs/claims.md"
PICTURES = REPOSITORY / "docs/pictures/claims"
TRACE = REPOSITORY / "tests/vectors/conversation_trace.jsonl.xz"
OF_TRACE = frozenset({"trace", "trace verdicts"})
"""Tables that take the trace, and so a minute."""
TABLES = load()
CHOICE = Choice("llama-3.1-405b", "fp8", "gb200", "superpod")
CONTEXT, HITS = 131_072, 0.98
"""Of the page's example."""
_MADE = re.compile(r"(<!-- made: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
MODELS: tuple[tuple[str, KvPrecision], ...] = (
    ("llama-3.1-8b", "bf16"),
    ("gpt-oss-120b", "bf16"),
    ("llama-3.3-70b", "bf16"),
    ("llama-3.1-405b", "fp8"),
    ("deepseek-v3", "fp8"),
)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n\n"


def _at(model: str, kv: KvPrecision, gpu: str, context: int) -> Scenario:
    return scenario_of(TABLES, Choice(model, kv, gpu, "superpod"), context, 1.0).with_best_hits()


def _example(hits: float = HITS) -> Scenario:
    return scenario_of(TABLES, CHOICE, CONTEXT, hits)


def _tb_s(best: Scenario) -> str:
    threshold = best.g4_threshold_gb_s() * best.gpus / 1000
    return f"{threshold:.2f}" if threshold else "never"


def break_even() -> str:
    rows = []
    for model, kv in MODELS:
        for context in (32_768, 131_072):
            best = _at(model, kv, "gb200", context)
            rows.append(
                [
                    f"{model}, {kv}", f"{context:,}", f"{best.break_even_gb_s:.2f}", f"{best.supply:.1f}",
                    f"{best.speed_up('recompute'):.1f}", f"{best.hit_share:.1%}", _tb_s(best),
                ]
            )  # fmt: skip
    head = ("model", "context", "B*, GB/s", "supply", "at most", "at a hit share of", "5x over a G4 to, TB/s")
    return _table(head, rows)


def gpus() -> str:
    rows = []
    for gpu in ("h100", "gb200", "vr200"):
        for context in (32_768, 131_072, 1_048_576):
            best = _at("llama-3.3-70b", "bf16", gpu, context)
            rows.append(
                [
                    gpu, f"{context:,}", f"{best.tokens_s:,.0f}", f"{best.break_even_gb_s:.2f}",
                    f"{best.speed_up('recompute'):.1f}", _tb_s(best),
                ]
            )  # fmt: skip
    head = ("GPU", "context", "prefill, tokens/s", "B*, GB/s", "at most", "5x over a G4 to, TB/s")
    return _table(head, rows)


def hits() -> str:
    rows = []
    for share in STATED_HIT_SHARES:
        here = _example(share)
        rows.append(
            [
                f"{share:.0%}", f"{here.speed_up('recompute'):.2f}",
                f"{here.speed_up('recompute', overlapped=False):.2f}", f"{here.speed_up('g4'):.2f}",
                f"{here.speed_up('g4', overlapped=False):.2f}", here.limit(),
            ]
        )  # fmt: skip
    head = (
        "found",
        "over computing again",
        "the same, load first",
        "over G4",
        "the same, load first",
        "limit",
    )
    return _table(head, rows)


def whole_gpus() -> str:
    speed_up = _example().speed_up("recompute")
    cells = [f"{whole_gpu(speed_up, share):.2f}" for share in STATED_PREFILL_SHARES]
    return _table(("prefill's share of GPU time", *(f"{share:.0%}" for share in STATED_PREFILL_SHARES)),
                  [("whole GPU", *cells)])  # fmt: skip


def energy() -> str:
    here = _example()
    rows = []
    for way in WAYS:
        spent = here.energy(way)
        parts = (spent.computing, spent.waiting, spent.storage, spent.dpu, spent.total)
        rows.append([way, *(f"{part:.4f}" for part in parts)])
    return _table(("way", "computing", "waiting", "storage", "DPU", "in all, J"), rows)


def capacity() -> str:
    rows = _answer().capacities
    cells = [
        [row.stated, f"{row.enclosure_tb:.1f}", f"{row.pod_pb:.2f}", f"{row.gpu_tb:.2f}"] for row in rows
    ]
    return _table(("as it was said", "an enclosure, TB", "the pod, PB", "a GPU, TB"), cells)


def drives() -> str:
    rows = []
    for model, kv in MODELS:
        here = scenario_of(TABLES, Choice(model, kv, "gb200", "superpod"), 32_768, 0.8)
        rows.append([f"{model}, {kv}", f"{here.writes_a_day:.1f}", f"{here.retention_hours:.1f}"])
    return _table(("model", "writes of the capacity a day", "a value stays, h"), rows)


def _answer() -> Answer:
    return answer(TABLES, CHOICE, context=CONTEXT, hit_share=HITS)


def _verdicts(said: Answer) -> str:
    words = {True: "yes", False: "no", None: "not judged"}
    return _table(
        ("claim", "holds", "where"), [(one.claim, words[one.holds], one.where) for one in said.claims]
    )


def verdicts() -> str:
    return _verdicts(_answer())


def published() -> str:
    rows = [(row.what, row.published, row.here, row.judgement) for row in _answer().published]
    return _table(("what", "published", "here", "judged"), rows)


def curve(said: Answer) -> str:
    found = said.found
    assert found is not None
    rows = [
        [
            f"{point.blocks:,}", f"{found.tb_a_gpu(point.blocks):.2f}",
            *(f"{ratio:.1%}" for ratio in (point.fifo, point.lru, point.pool, point.clairvoyant)),
        ]
        for point in found.curve
    ]  # fmt: skip
    return _table(("blocks", "TB a GPU", "FIFO", "LRU", "the pool", "clairvoyant"), rows)


MADE: dict[str, Callable[[], str]] = {
    "break-even": break_even,
    "gpus": gpus,
    "hits": hits,
    "whole gpus": whole_gpus,
    "energy": energy,
    "capacity": capacity,
    "drives": drives,
    "verdicts": verdicts,
    "published": published,
}


def page_with(text: str, made: dict[str, str]) -> str:
    """The page with its tables made anew; one without a name in `made` stays."""

    def anew(found: re.Match[str]) -> str:
        return found[1] + made[found[2]] + found[3] if found[2] in made else found[0]

    return _MADE.sub(anew, text)


def names_in(text: str) -> set[str]:
    return {found[2] for found in _MADE.finditer(text)}


def main() -> None:
    made = {name: table() for name, table in MADE.items()}
    if "--plots" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.jsonl"
            file.write_bytes(lzma.decompress(TRACE.read_bytes()))
            found = answer(TABLES, CHOICE, trace=read_trace(file))
        made |= {"trace": curve(found), "trace verdicts": _verdicts(found)}
        draw_all(_answer(), PICTURES)
        (PICTURES / "hit_ratio.png").unlink()
        with tempfile.TemporaryDirectory() as folder:
            (hit_ratio,) = [path for path in draw_all(found, Path(folder)) if path.name == "hit_ratio.png"]
            (PICTURES / hit_ratio.name).write_bytes(hit_ratio.read_bytes())
    PAGE.write_text(page_with(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
