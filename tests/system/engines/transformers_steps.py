"""Run by LMCache's interpreter: transformers' Llama over LMCache's own engine, our storage plug-in below.

What is real: the model's code, LMCache's engine, token database, storage manager and CPU back-end, the pool.
Weights are random, and the same in each process. A prompt is computed a chunk of LMCache's at a time, so
each step has the same arithmetic whether chunks before it were computed or loaded: logits compare bit by bit.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.support.engines.engine_door import WORDS, end, options, prompt_tokens, serve
from tests.support.waiting import wait_until

CHUNK = 128
PREFIX = 4 * CHUNK
"""Tokens, where the test says nothing else."""
QUESTION = 16
GENERATED = 8
STORE_SECONDS = 30


class TensorsConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Between LMCache's chunks and a tensor (2, layers, tokens, heads x size), LMCache's KV_2LTD."""

    def __init__(self, layers: int, width: int) -> None:
        self._layers, self._width = layers, width

    def get_shape(self, num_tokens: int) -> Any:
        return torch.Size([2, self._layers, num_tokens, self._width])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kvcaches"][:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kvcaches"][:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for each, start, end_ in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(each, start, end_, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for each, start, end_ in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(each, start, end_, **kwargs)


class Engine:
    """A model and LMCache's engine over it."""

    def __init__(self, model: dict[str, int], lmcache: dict[str, Any], prefix: int) -> None:
        torch.manual_seed(35)
        self.prefix = prefix
        config = LlamaConfig(**model, vocab_size=WORDS, max_position_embeddings=1 << 15)
        self.model = LlamaForCausalLM(config).eval()
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.size = config.hidden_size // config.num_attention_heads
        self.cache = LMCacheEngineBuilder.get_or_create(
            "g35-test",
            LMCacheEngineConfig.from_dict({"chunk_size": CHUNK} | lmcache),
            LMCacheMetadata(
                model_name="org/model",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=torch.float32,
                kv_shape=(self.layers, 2, CHUNK, self.heads, self.size),
                chunk_size=CHUNK,
            ),
            TensorsConnector(self.layers, self.heads * self.size),
            lambda tensor, source: None,
            lambda value, source: value,
        )
        self.cache.post_init()

    @torch.inference_mode()
    def answer(self, prompt: int) -> dict[str, Any]:
        tokens = prompt_tokens(prompt, self.prefix + QUESTION)
        prefix = tokens[: self.prefix]
        room = torch.zeros(2, self.layers, self.prefix, self.heads * self.size)
        begun = time.perf_counter()
        found = 0
        if self.cache.lookup(prefix):
            found = int(self.cache.retrieve(prefix, kvcaches=room).sum())
        past = self._past(room[:, :, :found])
        digest = hashlib.sha256()
        for start in range(found, self.prefix, CHUNK):
            self._step(tokens[start : start + CHUNK], past, digest)
        said = [self._step(tokens[self.prefix :], past, digest)]
        first_s = time.perf_counter() - begun
        while len(said) < GENERATED:
            said.append(self._step(said[-1:], past, digest))
        if found < self.prefix:
            self._copy_into(room, past)
            self._store(prefix, room)
        return {
            "tokens": said,
            "prompt": self.prefix,
            "cached": found,
            "first_s": first_s,
            "digest": digest.hexdigest(),
        }

    def _step(self, tokens: list[int], past: Any, digest: Any) -> int:
        """The likeliest next token. The digest takes the logits from the question on."""
        done = self.model(torch.tensor([tokens]), past_key_values=past, use_cache=True, logits_to_keep=1)
        if len(tokens) != CHUNK:
            digest.update(done.logits[0, -1].numpy().tobytes())
        return int(done.logits[0, -1].argmax())

    def _past(self, room: Any) -> Any:
        past = DynamicCache()
        if room.shape[2]:
            for layer in range(self.layers):
                keys, values = (
                    room[which, layer].view(1, -1, self.heads, self.size).transpose(1, 2).clone()
                    for which in (0, 1)
                )
                past.update(keys, values, layer)
        return past

    def _copy_into(self, room: Any, past: Any) -> None:
        for layer in range(self.layers):
            for which, tensor in enumerate((past.layers[layer].keys, past.layers[layer].values)):
                room[which, layer] = tensor[0, :, : self.prefix].transpose(0, 1).reshape(self.prefix, -1)

    def _store(self, prefix: list[int], room: Any) -> None:
        """Through LMCache, and until each of its back-ends has stored or given up."""
        self.cache.store(prefix, kvcaches=room)
        backends = self.cache.storage_manager.storage_backends.values()
        keys = [key for _, _, key in self.cache.token_database.process_tokens(prefix)]
        wait_until(
            lambda: not any(backend.exists_in_put_tasks(key) for backend in backends for key in keys),
            STORE_SECONDS,
            "the store to end",
        )


def main() -> None:
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    torch.set_num_threads(2)
    given = options()
    engine = Engine(given["model"], given["lmcache"], given.get("prefix", PREFIX))
    serve(engine.answer)
    LMCacheEngineBuilder.destroy("g35-test")
    end()


if __name__ == "__main__":
    main()
