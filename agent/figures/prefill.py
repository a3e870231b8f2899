"""What computing a prompt costs, by its length: attention grows with the square of the tokens.

It counts two operations for each parameter and for each multiply-add of attention (Kaplan et al. 2020,
section 2.1).
"""

from dataclasses import dataclass

from agent.figures.tables import Model


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Operations of a prefill: for each token, and for each token and earlier token that it attends to.

    Sparse attention with an indexer looks at every earlier token with the indexer's heads, and attends to
    `top_k` of them with the others.
    """

    per_token: float
    per_pair: float
    top_k: int | None = None
    per_chosen_pair: float = 0.0

    def flops(self, context: int) -> float:
        """Operations of a prompt of `context` tokens, computed from nothing."""
        return self.linear(context) + self.per_pair * context**2 / 2

    def linear(self, context: int) -> float:
        """The part that grows with the tokens alone."""
        return self.per_token * context + self.per_chosen_pair * self._chosen_pairs(context)

    def _chosen_pairs(self, context: int) -> float:
        """The first `top_k` tokens attend to all that are before them, and each later one to `top_k`."""
        if self.top_k is None:
            return 0.0
        first = min(context, self.top_k)
        return first**2 / 2 + (context - first) * self.top_k

    def attention_share(self, context: int) -> float:
        """Share of the operations that grows with the square of the context."""
        return 1 - self.linear(context) / self.flops(context)


def prefill_tokens_s(cost: PrefillCost, flops_s: float, context: int) -> float:
    """Mean tokens a second of one GPU over a whole prompt of `context` tokens."""
    return flops_s * context / cost.flops(context)


def cost_of(model: Model) -> PrefillCost | None:
    """Of a model; None where its parameters were not published."""
    if model.parameters is None:
        return None
    layers = sum(count / ratio for count, ratio in model.layers)
    main = 2 * model.attention_width * layers
    per_token = 2 * model.parameters.active * 1e9
    if model.indexer is None:
        return PrefillCost(per_token, main)
    looked = sum(count / ratio for count, ratio in model.indexer.layers)
    indexing = 2 * model.indexer.heads * model.indexer.elements * looked
    return PrefillCost(per_token, indexing, model.indexer.top_k, main)
