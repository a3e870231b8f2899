"""What a token's keys and values weigh, by model: one table, for `g35 replay --model`.

Each row has the figures of the model's own `config.json` on Hugging Face, so a reader can check it. Three
kinds of attention are counted:

* grouped queries: layers x 2 x kv heads x head size elements, bfloat16 as most engines store them;
* one latent vector a layer (MLA): layers x (kv_lora_rank + qk_rope_head_dim) elements;
* compressed latents (DeepSeek-V4): a layer stores one entry for `ratio` tokens.

Not counted: states that do not grow with the prefix (sliding windows, Mamba states) and an indexer's keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BFLOAT16 = 2
FP8 = 1


@dataclass(frozen=True, slots=True)
class ModelCache:
    """A model's cache. `layers`: (how many, tokens that share one entry) for each kind of layer."""

    entry_bytes: int
    """Of one layer, for one token or for those that share an entry."""
    layers: tuple[tuple[int, int], ...]
    source: str

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, rounded up."""
        return sum(-(-self.entry_bytes * count // ratio) for count, ratio in self.layers)


def _grouped(repository: str, layers: int, kv_heads: int, head_size: int) -> ModelCache:
    return ModelCache(
        2 * kv_heads * head_size * BFLOAT16, ((layers, 1),), f"huggingface.co/{repository}, config.json"
    )


def _latent(repository: str, layers: int, rank: int, rotary: int, element: int) -> ModelCache:
    return ModelCache((rank + rotary) * element, ((layers, 1),), f"huggingface.co/{repository}, config.json")


MODELS: Mapping[str, ModelCache] = MappingProxyType(
    {
        "llama-3.1-8b": _grouped("meta-llama/Llama-3.1-8B", 32, 8, 128),
        "llama-3.3-70b": _grouped("meta-llama/Llama-3.3-70B-Instruct", 80, 8, 128),
        "llama-3.1-405b": _grouped("meta-llama/Llama-3.1-405B", 126, 8, 128),
        "qwen3-8b": _grouped("Qwen/Qwen3-8B", 36, 8, 128),
        "qwen3-32b": _grouped("Qwen/Qwen3-32B", 64, 8, 128),
        "qwen3-235b-a22b": _grouped("Qwen/Qwen3-235B-A22B", 94, 4, 128),
        "deepseek-v3": _latent("deepseek-ai/DeepSeek-V3", 61, 512, 64, BFLOAT16),
        "deepseek-v3-fp8": _latent("deepseek-ai/DeepSeek-V3", 61, 512, 64, FP8),
        # 448 elements in fp8, 64 rotary ones in bfloat16; 30 layers keep one entry for 4 tokens, 31 for 128.
        "deepseek-v4-pro-fp8": ModelCache(
            448 * FP8 + 64 * BFLOAT16,
            ((30, 4), (31, 128)),
            "huggingface.co/deepseek-ai/DeepSeek-V4-Pro, config.json and DeepSeek_V4.pdf",
        ),
    }
)
