"""Run by the interpreter that has llama.cpp's server: slots of the server are kept as files on the pool.

The server is llama.cpp's own, with its HTTP door, as the package xllamacpp builds it. A prompt is answered as
its users do it: the slot is restored from the prefix's file; where that fails the prefix is computed and the
slot is saved. The weights are random, and the same in each process.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

from tests.support.engines.engine_door import WORDS, end, options, prompt_tokens, serve
from tests.support.engines.gguf_llama import write_llama

PREFIX = 512
"""Tokens, where the test says nothing else."""
QUESTION = 16
GENERATED = 8
THREADS = 2
ANSWER_SECONDS = 100.0
TRIES = 3
"""A pool on a busy machine may refuse once, or answer too late."""


class Engine:
    """llama.cpp's server with one slot, and a client of it."""

    def __init__(self, model: str, prefix: int, slots: str) -> None:
        """`slots`: the folder of the slots' files; empty for an engine that keeps none."""
        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.n_ctx = prefix + 8 * (QUESTION + GENERATED)
        parameters.n_parallel = 1
        parameters.hostnames = ["127.0.0.1"]
        parameters.port = 0
        parameters.warmup = False
        parameters.cpuparams.n_threads = THREADS
        parameters.cpuparams_batch.n_threads = THREADS
        parameters.cache_ram_mib = 0  # Nothing is kept but by the slots' files.
        if slots:
            os.makedirs(slots, exist_ok=True)
            parameters.slot_save_path = os.path.join(slots, "")
        self.prefix, self.keeps = prefix, bool(slots)
        self._server = xllamacpp.Server(parameters)

    def answer(self, prompt: int) -> dict[str, Any]:
        tokens = prompt_tokens(prompt, self.prefix + QUESTION)
        begun = time.perf_counter()
        found = self._slot("restore", prompt) if self.keeps else {}
        cached = int(found.get("n_restored", 0))
        if not cached:
            self._complete(tokens[: self.prefix], 0)
        before = time.perf_counter() - begun
        kept = self._slot("save", prompt) if self.keeps and not cached else {}
        said = self._complete(tokens, GENERATED)
        timings = said["timings"]
        assert timings["cache_n"] == self.prefix, timings
        if kept:
            print(f"saved {kept}")
        shown = [[each["id"], each["logprob"]] for each in said["completion_probabilities"]]
        return {
            "tokens": said["tokens"],
            "prompt": self.prefix,
            "cached": cached,
            "first_s": before + timings["prompt_ms"] / 1000,
            "digest": hashlib.sha256(json.dumps(shown).encode()).hexdigest(),
        }

    def _complete(self, tokens: list[int], count: int) -> dict[str, Any]:
        return self._post(
            "/completion",
            prompt=tokens, n_predict=count, temperature=0, n_probs=1, ignore_eos=True, id_slot=0,
            cache_prompt=True, return_tokens=True,
        )  # fmt: skip

    def _slot(self, action: str, prompt: int) -> dict[str, Any]:
        """What the server said of the slot's file; empty where it refused each time."""
        for _ in range(TRIES):
            try:
                return self._post(f"/slots/0?action={action}", filename=f"prompt-{prompt}.bin")
            except urllib.error.HTTPError as refused:
                print(f"{action} refused: {refused.read().decode()}")
        return {}

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        address = self._server.listening_address
        request = urllib.request.Request(
            f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def main() -> None:
    given = options()
    prefix = given.get("prefix", PREFIX)
    folder = Path(given["model_folder"])
    folder.mkdir(exist_ok=True)
    model = folder / "llama.gguf"
    write_llama(str(model), given["model"], WORDS, 2 * prefix)
    engine = Engine(str(model), prefix, given["slots"] or "")
    serve(engine.answer)
    end()


if __name__ == "__main__":
    main()
