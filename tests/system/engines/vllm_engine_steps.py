"""Run by the interpreter of vLLM's CPU build: the whole engine, with a secondary tier on the pool.

The model is Llama's with random weights (`load_format=dummy`), which vLLM makes alike in each process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.engine_door import WORDS, end, options, prompt_tokens, serve

PREFIX = 512
"""Tokens, where the test says nothing else."""
QUESTION = 16
GENERATED = 8
TURN_SECONDS = 0.0003
"""Of the interpreter's lock. vLLM's scheduler asks again and again while a tier loads. In the process of its
own that vLLM has for it, it sleeps for 1 ms each time. Here it would hold up the tier's threads for 5 ms, as
often as one comes back from a system call."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "float32",
    "vocab_size": WORDS,
    "max_position_embeddings": 1 << 15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def engine(given: dict[str, Any], folder: Path) -> Any:
    """vLLM as a program has it, its scheduler and worker in this process.

    `folder`: where the model's configuration lies. Its path is the model's name, a part of each block's.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | given["model"]))
    transfer = None
    if given.get("tier"):
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "CpuTensorsSpec",
                "spec_module_path": "tests.support.engines.vllm_cpu_tensors",
                "cpu_bytes_to_use": given["cpu_bytes"],
                "blocks_per_chunk": given.get("chunk_blocks", 1),
                "secondary_tiers": [given["tier"]],
            },
        )
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2 * given.get("prefix", PREFIX),
        max_num_seqs=4,
        kv_cache_memory_bytes=given["kv_bytes"],
        block_size=given["block_tokens"],
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        seed=35,
    )


def main() -> None:
    given = options()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    sys.setswitchinterval(TURN_SECONDS)
    llm = engine(given, Path(given["model_folder"]))
    from vllm import SamplingParams

    prefix = given.get("prefix", PREFIX)
    groups = len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
    sampling = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)

    def answer(prompt: int) -> dict[str, Any]:
        tokens = prompt_tokens(prompt, prefix + QUESTION)
        (done,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return {
            "tokens": list(done.outputs[0].token_ids),
            "prompt": prefix,
            "cached": done.num_cached_tokens,
            "first_s": done.metrics.first_token_latency,
            "groups": groups,
        }

    serve(answer)
    llm.llm_engine.engine_core.shutdown()
    end()


if __name__ == "__main__":
    main()
