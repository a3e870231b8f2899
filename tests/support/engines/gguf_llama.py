"""A Llama of random weights in llama.cpp's file format, made alike in each process. The engine's interpreter
has the packages `gguf` and `numpy`."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

BYTES = 256
"""Of the vocabulary, behind the three words that mean something to the tokenizer."""
SPREAD = 0.08
SEED = 35


def write_llama(path: str, model: dict[str, int], words: int, context: int) -> None:
    """A file of float32 weights. `model`: as transformers names the sizes; `words`: of the vocabulary."""
    width, heads = model["hidden_size"], model["num_attention_heads"]
    kv_heads, inner = model["num_key_value_heads"], model["intermediate_size"]
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(context)
    file.add_embedding_length(width)
    file.add_block_count(model["num_hidden_layers"])
    file.add_feed_forward_length(inner)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(width // heads)
    _add_vocabulary(file, words)
    dice = np.random.default_rng(SEED)

    def add(name: str, *shape: int) -> None:
        file.add_tensor(f"{name}.weight", dice.standard_normal(shape, np.float32) * np.float32(SPREAD))

    def add_norm(name: str) -> None:
        file.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    add("token_embd", words, width)
    add("output", words, width)
    add_norm("output_norm")
    for layer in range(model["num_hidden_layers"]):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm")
        add(f"{block}.attn_q", width, width)
        add(f"{block}.attn_k", width // heads * kv_heads, width)
        add(f"{block}.attn_v", width // heads * kv_heads, width)
        add(f"{block}.attn_output", width, width)
        add_norm(f"{block}.ffn_norm")
        add(f"{block}.ffn_gate", inner, width)
        add(f"{block}.ffn_up", inner, width)
        add(f"{block}.ffn_down", width, inner)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _add_vocabulary(file: Any, words: int) -> None:
    kind = gguf.TokenType
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(BYTES))]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * BYTES]
    more = words - len(tokens)
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens + [f"word{number}".encode() for number in range(more)])
    file.add_token_types(kinds + [kind.NORMAL] * more)
    file.add_token_scores([0.0] * words)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
