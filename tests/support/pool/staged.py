"""A slot in a `PrestageCache`, as if somebody had read it off flash."""

from __future__ import annotations

from agent.pool.read.prestage_cache import PrestageCache


def add_staged(
    cache: PrestageCache,
    volume_id: bytes,
    pseudonym: bytes,
    generation: int,
    slot: memoryview,
    *,
    guessed: bool = False,
) -> bool:
    """Whether it is kept."""
    cache.expect(volume_id, pseudonym, guessed=guessed)
    return cache.bring(volume_id, pseudonym, generation, slot, guessed=guessed)
