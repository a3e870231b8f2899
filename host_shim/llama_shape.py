"""A Llama-shaped model with random weights: the arithmetic of a prefill and its KV cache, and no sense.

RMSNorm, rotary positions, grouped-query attention and SwiGLU as in Llama 3. `torch` is handed in, because
this wheel needs the standard library alone. A prefill costs the same with random weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

ROPE_THETA = 500_000.0
NORM_EPSILON = 1e-5
WEIGHT_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; `heads` is a multiple of `kv_heads`, `head_size` is even."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    width: int
    inner: int
    words: int

    def block_bytes(self, tokens: int, element_bytes: int) -> int:
        """Bytes of keys and values of so many tokens, over all layers."""
        return self.layers * 2 * self.kv_heads * tokens * self.head_size * element_bytes


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(layers=4, heads=8, kv_heads=2, head_size=32, width=256, inner=768, words=1024),
        "1b": Shape(layers=16, heads=32, kv_heads=8, head_size=64, width=2048, inner=8192, words=128_256),
        "8b": Shape(layers=32, heads=32, kv_heads=8, head_size=128, width=4096, inner=14_336, words=128_256),
    }
)
"""The larger two are those of Llama 3.2 1B and Llama 3.1 8B."""


class Model:
    """Weights on a device. `torch` is the module, `kind` one of its floating-point types."""

    def __init__(self, torch: Any, shape: Shape, device: str, kind: Any, seed: int = 35) -> None:
        self.torch, self.shape, self.device, self.kind = torch, shape, device, kind
        self._dice = torch.Generator(device=device).manual_seed(seed)
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self._words = self._weights(shape.words, shape.width)
        self._layers = [
            {
                "queries": self._weights(queries, shape.width),
                "keys": self._weights(keys, shape.width),
                "values": self._weights(keys, shape.width),
                "out": self._weights(shape.width, queries),
                "gate": self._weights(shape.inner, shape.width),
                "up": self._weights(shape.inner, shape.width),
                "down": self._weights(shape.width, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        even = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32)
        self._frequencies = ROPE_THETA ** (-even / shape.head_size)

    def new_cache(self, tokens: int) -> Any:
        """Room for keys and values: (layers, 2, kv_heads, tokens, head_size)."""
        shape = self.shape
        size = (shape.layers, 2, shape.kv_heads, tokens, shape.head_size)
        return self.torch.zeros(size, device=self.device, dtype=self.kind)

    def prefill(self, tokens: Any, cache: Any, start: int) -> Any:
        """Logits of the last of `tokens`, which stand at `start` and behind; their keys and values go into
        `cache`, in which those of everything before `start` are already."""
        functional = self.torch.nn.functional
        count = len(tokens)
        end = start + count
        turn = self._turns(start, end)
        seen = None
        if start:  # each sees all that was before and, of the new ones, those up to itself
            seen = self.torch.ones(count, end, dtype=self.torch.bool, device=self.device).tril(start)
        state = self._words[tokens]
        for number, layer in enumerate(self._layers):
            normal = self._normal(state)
            queries = _turned(self.torch, self._heads(normal @ layer["queries"].T), turn)
            cache[number, 0, :, start:end] = _turned(self.torch, self._heads(normal @ layer["keys"].T), turn)
            cache[number, 1, :, start:end] = self._heads(normal @ layer["values"].T)
            share = self.shape.heads // self.shape.kv_heads
            keys, values = (cache[number, which, :, :end].repeat_interleave(share, 0) for which in (0, 1))
            looked = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=seen, is_causal=seen is None
            )[0]
            state = state + looked.transpose(0, 1).reshape(count, -1) @ layer["out"].T
            normal = self._normal(state)
            inner = functional.silu(normal @ layer["gate"].T) * (normal @ layer["up"].T)
            state = state + inner @ layer["down"].T
        return (self._normal(state[-1:]) @ self._words.T)[0].float()

    def _weights(self, rows: int, columns: int) -> Any:
        made = self.torch.empty(rows, columns, device=self.device, dtype=self.kind)
        return made.normal_(0.0, WEIGHT_SPREAD, generator=self._dice)

    def _normal(self, state: Any) -> Any:
        """RMSNorm with a gain of one."""
        wide = state.float()
        return (wide * self.torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)).to(self.kind)

    def _heads(self, flat: Any) -> Any:
        """(tokens, heads x head_size) to (heads, tokens, head_size)."""
        return flat.view(len(flat), -1, self.shape.head_size).transpose(0, 1)

    def _turns(self, start: int, end: int) -> tuple[Any, Any]:
        """Cosines and sines of the positions from `start` to `end`: (tokens, head_size / 2) each."""
        at = self.torch.arange(start, end, device=self.device, dtype=self.torch.float32)
        angles = at[:, None] * self._frequencies
        return angles.cos().to(self.kind), angles.sin().to(self.kind)


def _turned(torch: Any, heads: Any, turn: tuple[Any, Any]) -> Any:
    """Rotary positions: the first half of a head and the second are the two coordinates."""
    cosines, sines = turn
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
