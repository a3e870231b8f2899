"""What the tier is for, as a number: the time to the first token, a prefix recomputed against restored.

    python -m host_shim.first_token --mount /mnt/g35 --volume kv --device cuda --model 8b

A model of Llama's shape with random weights (llama_shape.py) reads a prompt, a known prefix and a question.
Once it computes all of it; once it gets the prefix's keys and values from the pool and computes the question
alone. The table says from which length on restoring pays. Needs torch, and a volume whose slots hold a block.

A block is `--block-tokens` tokens over all layers: (layers, keys and values, kv_heads, tokens, head_size).
Restored bits are compared with the stored, and the logits of both ways; where they differ there is no figure.
"""

import argparse
import ctypes
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from host_shim.control_wire import KEY_BYTES, VALUE_BYTES_MAX
from host_shim.llama_shape import SHAPES, Model
from host_shim.pool import Pool, UnknownVolume, Volume
from host_shim.unlocked_memory import new_memory

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
LOGITS_OFF_MAX = {"float32": 1e-3, "bfloat16": 0.1}
"""Between logits of the two ways, as a part of the largest logit: sums are taken in another order."""
GIBIBYTE = 1 << 30


class CannotSay(Exception):
    """There is no figure, and the words say why and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One length of the prefix. Seconds are medians; `logits_off` as LOGITS_OFF_MAX."""

    tokens: int
    bytes: int
    recomputed_s: float
    restored_s: float
    get_s: float
    logits_off: float


@contextmanager
def pinned(torch: Any, device: str, memory: memoryview) -> Iterator[None]:
    """For a GPU, let it copy from and to this memory by itself. Raises CannotSay where CUDA refuses that."""
    if not device.startswith("cuda"):
        yield
        return
    runtime = torch.cuda.cudart()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    refused = int(runtime.cudaHostRegister(address, len(memory), 0))
    if refused:
        raise CannotSay(f"CUDA does not pin {len(memory)} bytes: error {refused}; fewer --lengths need less")
    try:
        yield
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(address)


class Blocks:
    """A prefix's blocks between the model's cache and the pool."""

    def __init__(
        self, model: Model, volume: Volume, memory: memoryview, block_tokens: int, tokens: int
    ) -> None:
        """They lie at the beginning of `memory`."""
        torch, shape = model.torch, model.shape
        self._model, self._volume, self._tokens = model, volume, tokens
        self.count = tokens // block_tokens
        size = (self.count, shape.layers, 2, shape.kv_heads, block_tokens, shape.head_size)
        self.block_bytes = shape.block_bytes(block_tokens, model.kind.itemsize)
        whole = memory[: self.count * self.block_bytes]
        self._host_bytes = torch.frombuffer(whole, dtype=torch.uint8)
        self._host = self._host_bytes.view(model.kind).view(size)
        self._views = [whole[at : at + self.block_bytes] for at in range(0, len(whole), self.block_bytes)]

    def store(self, cache: Any, keys: Sequence[bytes]) -> None:
        """Put the blocks of a cache; raises CannotSay where the pool does not take all of them."""
        self._host.copy_(self._in_blocks(cache))
        stored = self._volume.put_many(keys, self._views)
        if not all(stored):
            raise CannotSay(
                f"the pool took {sum(stored)} of {self.count} blocks of {self.block_bytes} bytes; "
                "is the agent up, and is there room in the volume?"
            )

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Get the blocks into the host's memory; raises CannotSay where one is not there."""
        lengths = self._volume.get_many(keys, self._views)
        missing = sum(length != self.block_bytes for length in lengths)
        if missing:
            raise CannotSay(f"{missing} of {self.count} blocks that were just stored were misses")

    def restore(self, cache: Any) -> None:
        """Put what was fetched into a cache."""
        self._in_blocks(cache).copy_(self._host, non_blocking=True)

    def forget(self) -> None:
        """Overwrite the host's memory, so that what was stored can be nowhere but in the pool."""
        self._host_bytes.fill_(0xA5)

    def same_as(self, cache: Any) -> bool:
        """Whether the host's memory has the bits of a cache."""
        own = self._in_blocks(cache).contiguous().view(self._model.torch.uint8).cpu()
        return bool(self._model.torch.equal(own.flatten(), self._host_bytes))

    def _in_blocks(self, cache: Any) -> Any:
        """A view of the prefix in a cache: (blocks, layers, 2, kv_heads, tokens, head_size)."""
        prefix = cache[:, :, :, : self._tokens]
        return prefix.unflatten(3, (self.count, -1)).permute(3, 0, 1, 2, 4, 5)


def chained_keys(fingerprint: str, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """One key for each whole block; each covers the model, the block and all before it."""
    parent, found = fingerprint.encode(), []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = ",".join(map(str, tokens[at : at + block_tokens])).encode()
        parent = hashlib.blake2b(parent + b"|" + block, digest_size=KEY_BYTES).digest()
        found.append(parent)
    return found


def measured(
    model: Model, volume: Volume, memory: memoryview, tokens: int, options: argparse.Namespace
) -> Row:
    """One length; the blocks are deleted again."""
    torch = model.torch
    dice = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(model.shape.words, (tokens + options.question,), generator=dice)
    on_device = prompt.to(model.device)
    cache = model.new_cache(len(prompt))
    blocks = Blocks(model, volume, memory, options.block_tokens, tokens)
    fingerprint = f"first_token {options.model} {model.kind} {options.block_tokens}"
    keys = chained_keys(fingerprint, prompt[:tokens].tolist(), options.block_tokens)
    # A processor has done what it was told when the call returns.
    wait = torch.cuda.synchronize if model.device.startswith("cuda") else lambda: None
    recomputed, recomputing = _timed(lambda: model.prefill(on_device, cache, 0), wait, options.rounds)
    try:
        blocks.store(cache, keys)
        other = model.new_cache(len(prompt))
        gets: list[float] = []

        def restored() -> Any:
            began = time.perf_counter()
            blocks.fetch(keys)
            gets.append(time.perf_counter() - began)
            blocks.restore(other)
            return model.prefill(on_device[tokens:], other, tokens)

        blocks.forget()
        answer, restoring = _timed(restored, wait, options.rounds)
        if not blocks.same_as(cache):
            raise CannotSay("the pool returned other bytes than were stored; please file a bug")
    finally:
        volume.delete(keys)
    off = float((answer - recomputed).abs().max() / recomputed.abs().max())
    if not off <= LOGITS_OFF_MAX[options.dtype]:
        raise CannotSay(f"the logits of the two ways differ by {off:.2g}; please file a bug")
    size = blocks.count * blocks.block_bytes
    return Row(tokens, size, recomputing, restoring, median(gets[1:]), off)


def break_even(rows: Sequence[Row]) -> float | None:
    """The length from which on restoring is quicker, interpolated between two; None where there is none."""
    found: float | None = None
    before: Row | None = None
    for row in sorted(rows, key=lambda row: row.tokens):
        gain = row.recomputed_s - row.restored_s
        if gain <= 0:
            found = None
        elif found is None:
            found = float(row.tokens)
            if before is not None:
                loss = before.restored_s - before.recomputed_s
                found = before.tokens + (row.tokens - before.tokens) * loss / (loss + gain)
        before = row
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'prefix':>8} {'MiB':>9} {'recomputed':>12} {'restored':>12} {'of it gets':>12} {'GiB/s':>7}"]
    for row in rows:
        speed = row.bytes / GIBIBYTE / row.get_s
        lines.append(
            f"{row.tokens:>8} {row.bytes / (1 << 20):>9.1f} {row.recomputed_s * 1e3:>9.1f} ms "
            f"{row.restored_s * 1e3:>9.1f} ms {row.get_s * 1e3:>9.1f} ms {speed:>7.2f}"
        )
    even = break_even(rows)
    lines.append("restoring never pays here" if even is None else f"restoring pays from {even:.0f} tokens on")
    return "\n".join(lines)


def run(torch: Any, options: argparse.Namespace) -> list[Row]:
    """All lengths. Raises CannotSay."""
    shape = SHAPES[options.model]
    cuda = options.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise CannotSay(f"torch finds no {options.device} here; --device cpu works anywhere")
    kind = getattr(torch, options.dtype)
    size = shape.block_bytes(options.block_tokens, kind.itemsize)
    with Pool(options.mount) as pool, torch.inference_mode():
        try:
            told = pool.volume(options.volume).stats()
        except UnknownVolume as unknown:
            raise CannotSay(str(unknown)) from None
        if not told:
            raise CannotSay(f"there is no agent behind {options.mount}; g35 status says more")
        room = min(int(told["value_bytes"]), VALUE_BYTES_MAX)
        if size > room:
            raise CannotSay(
                f"a block has {size} bytes and a slot of volume {options.volume} holds {room}: "
                "fewer --block-tokens, or a volume of larger slots"
            )
        model, volume = Model(torch, shape, options.device, kind), pool.volume(options.volume)
        count = max(options.lengths) // options.block_tokens
        memory = new_memory(count * size) if options.unregistered else pool.memory(count * size)
        with pinned(torch, options.device, memory):
            return [measured(model, volume, memory, tokens, options) for tokens in options.lengths]


def _timed(work: Callable[[], Any], wait: Callable[[], None], rounds: int) -> tuple[Any, float]:
    """What it returns, and the median of the seconds it takes, once it has been done once."""
    result = work()
    wait()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        result = work()
        wait()
        taken.append(time.perf_counter() - began)
    return result, median(taken)


def _lengths(text: str) -> list[int]:
    found = sorted({int(part) for part in text.split(",")})
    if not found or found[0] < 1:
        raise ValueError(text)
    return found


def _options(words: Sequence[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m host_shim.first_token", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--mount", required=True, help="where the pool is mounted")
    made.add_argument("--volume", default="kv", help="a volume of kind kv (default: kv)")
    made.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    made.add_argument("--model", choices=sorted(SHAPES), default="tiny", help="its shape (default: tiny)")
    made.add_argument(
        "--lengths", type=_lengths, default=list(LENGTHS), help="tokens of the prefix, e.g. 512,4096"
    )
    made.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (default: 16)")
    made.add_argument("--question", type=int, default=16, help="tokens behind the prefix (default: 16)")
    made.add_argument(
        "--unregistered",
        action="store_true",
        help="use memory that is not registered with the agent, as another engine's is",
    )
    made.add_argument("--rounds", type=int, default=5, help="times that each is done (default: 5)")
    made.add_argument(
        "--dtype", choices=sorted(LOGITS_OFF_MAX), help="of weights and cache (default: bfloat16 on cuda)"
    )
    made.add_argument("--json", type=Path, help="write the figures to this file as well")
    found = made.parse_args(words)
    if min(found.block_tokens, found.question, found.rounds) < 1:
        made.error("--block-tokens, --question and --rounds are at least 1")
    found.dtype = found.dtype or ("bfloat16" if found.device.startswith("cuda") else "float32")
    wrong = [length for length in found.lengths if length % found.block_tokens]
    if wrong:
        made.error(f"{wrong[0]} tokens are no whole number of blocks of {found.block_tokens}")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """0, or 1 where there is no figure."""
    options = _options(sys.argv[1:] if words is None else words)
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print("error: torch is not installed in this interpreter; any build of it will do", file=sys.stderr)
        return 1
    try:
        rows = run(torch, options)
    except CannotSay as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    print(table(rows))
    if options.json is not None:
        found = {
            "device": options.device,
            "model": options.model,
            "dtype": options.dtype,
            "shape": asdict(SHAPES[options.model]),
            "block_tokens": options.block_tokens,
            "registered": not options.unregistered,
            "question_tokens": options.question,
            "rows": [asdict(row) for row in rows],
            "break_even_tokens": break_even(rows),
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
