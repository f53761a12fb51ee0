"""What a model computes itself of a cache that it is handed: some tokens, a block of layers, or both.

    layers=a-b        all tokens in layers a to b - 1, on what entered layer a of the source (of layer 0: the embeddings, so exact)
    deviating=P%      then the tokens whose rows, at the last of these layers, differ most from those handed over
    first=N           then the first tokens, which see nothing but one another: exact
    newest=P%         then the newest, which see all

Tokens run through all layers, but where the block begins at layer 0 and is longer than that one they go on from its end. Of the last layer
of a block that no token goes on from, keys and values alone are computed: layers=0-1 costs little, and is exact.
CacheBlend (Yao et al. 2025) chooses by deviation, DroidSpeak (Liu et al. 2026) recomputes a block of layers.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvtool.bridges.running import rows_of, run_chosen, run_span
from kvtool.bridges.work import Work
from kvtool.model import LoadedModel
from kvtool.states import CacheState

LOOK = (0, 2)  # the layers where deviation is measured, unless a block is asked for: the first that sees other tokens is the second
_TOKENS = re.compile(r"(first|newest|deviating)=([0-9]{1,9}(?:\.[0-9]{1,9})?)(%?)")
_LAYERS = re.compile(r"layers=([0-9]{1,9})-([0-9]{1,9})")
EXAMPLE = "first=4,newest=20%, deviating=10% or layers=9-15"


@dataclass(frozen=True)
class Recompute:
    """What the target computes itself.

    Attributes:
        first: tokens at the start.
        newest: tokens at the end.
        deviating: other tokens, those whose rows deviate most.
        layers: first layer of a block and the one after its last, or None.
    """

    first: int = 0
    newest: int = 0
    deviating: int = 0
    layers: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str, length: int) -> "Recompute":
        """From "first=4,newest=20%,deviating=5%,layers=9-15": tokens, or per cent of `length`, and layers 9 to 14.

        Raises:
            ValueError: anything else, or more than there is.
        """
        found: dict[str, int] = {}
        layers: tuple[int, int] | None = None
        for word in map(str.strip, text.split(",")):
            block, match = _LAYERS.fullmatch(word), _TOKENS.fullmatch(word)
            if block is not None and layers is None:
                layers = int(block[1]), int(block[2])
                continue
            if match is None or match[1] in found:
                raise ValueError(f"[recompute] must be such as {EXAMPLE}, but got {text!r}.")
            amount = float(match[2]) * length / 100 if match[3] else float(match[2])
            if not match[3] and amount != int(amount):
                raise ValueError(f"[recompute] {match[1]} must be a whole number of tokens, or per cent, but got {match[2]}.")
            found[match[1]] = int(amount)
        if layers is not None and not layers[0] < layers[1]:
            raise ValueError(f"[recompute] layers must be a-b with a < b (b is not run), but got {layers[0]}-{layers[1]}.")
        plan = cls(**found, layers=layers)
        plan.check(length)
        return plan

    def check(self, length: int, layers: int | None = None) -> None:
        """Raise ValueError where there are not so many tokens, or layers."""
        if self.first + self.newest + self.deviating > length:
            raise ValueError(
                f"[recompute] first, newest and deviating must be at most the {length} tokens of the cache together, but got "
                f"{self.first}, {self.newest} and {self.deviating}."
            )
        if layers is not None and self.block is not None and self.block[1] > layers:
            raise ValueError(f"[recompute] layers must end at {layers} at most, but got {self.block[0]}-{self.block[1]}.")

    @property
    def block(self) -> tuple[int, int] | None:
        """The layers that run over all tokens."""
        return self.layers or (LOOK if self.deviating else None)

    @property
    def needs_input(self) -> int | None:
        """The layer whose input the source must give, or None."""
        return self.block[0] if self.block is not None and self.block[0] else None

    @property
    def goes_on_from(self) -> int:
        """The layer that chosen tokens begin at."""
        # Running layer 0 twice for them is less than running all of it for every token.
        return self.block[1] if self.block is not None and not self.block[0] and self.block[1] > 1 and self.tokens else 0

    @property
    def tokens(self) -> int:
        """Tokens that run through layers by themselves."""
        return self.first + self.newest + self.deviating

    def share(self, work: Work, length: int, chosen: Sequence[int] | None = None) -> float:
        """Of the prefill's arithmetic.

        Args:
            chosen: positions of the deviating tokens; None takes them as spread evenly.
        """
        low, rest = self.goes_on_from, range(self.first, length - self.newest)
        done = 0
        if self.block is not None:
            last = self.block[1] - 1
            done = work.span(0, length, self.block[0], self.block[1] if low else last) + (0 if low else work.rows(length, last))
        done += work.span(0, self.first, low) + work.span(length - self.newest, length, low)
        if self.deviating:
            at = chosen if chosen is not None else [rest[i * len(rest) // self.deviating] for i in range(self.deviating)]
            done += sum(work.span(i, i + 1, low) for i in at)
        return work.share(done, length)

    def words(self) -> list[str]:
        """What is recomputed, in words."""
        found = [f"{getattr(self, name)} {name} tokens" for name in ("first", "newest", "deviating") if getattr(self, name)]
        if self.block is not None:
            first, last = self.block[0], self.block[1] - 1
            found.append(f"layer {first}" if first == last else f"layers {first} to {last}")
        return found


def recomputed(
    states: Sequence[CacheState],
    tokens: Sequence[int],
    model: LoadedModel,
    plan: Recompute,
    layer_input: Callable[[int], mx.array],
) -> tuple[list[CacheState], list[int]]:
    """The states with a part as the model computes it, and the positions of the deviating tokens.

    Args:
        states: of every layer, of full attention.
        tokens: their ids.
        layer_input: layer -> (S, E), what entered it in the source.

    Raises:
        ValueError: more than there is.
        IncompatibleError: the model cannot run such a part alone, or the source does not hold what enters the block.
    """
    length, handed, low = len(tokens), list(states), plan.goes_on_from
    plan.check(length, len(handed))
    states, left = list(states), None
    if plan.block is not None:
        given = None if plan.needs_input is None else layer_input(plan.needs_input)
        states, left = run_span(model, tokens, states, 0, length, plan.block, given, leaves=bool(low))
    ends = [*range(plan.first), *range(length - plan.newest, length)]
    chosen: list[int] = []
    if plan.deviating and plan.block is not None:
        at = plan.block[1] - 1
        apart = deviation(handed[at], states[at])
        apart[np.array(ends, int)] = -np.inf
        chosen = sorted(np.argsort(-apart, kind="stable")[: plan.deviating].tolist())
    if low == len(states):
        return states, chosen
    if chosen:
        run = sorted([*ends, *chosen])
        return run_chosen(model, tokens, states, run, low, left[mx.array(run)] if low and left is not None else None), chosen
    for start, stop in ((0, plan.first), (length - plan.newest, length)):
        if start < stop:
            enters = left[start:stop] if low and left is not None else None
            states, _ = run_span(model, tokens, states, start, stop, (low, len(states)), enters)
    return states, chosen


def deviation(handed: CacheState, own: CacheState) -> np.ndarray:
    """(S,): squared difference of each token's keys, and of its values, over their mean energy, all heads together."""
    total = np.zeros(handed.rows)
    for a, b in zip(rows_of(handed), rows_of(own), strict=True):
        x, y = (np.array(rows.astype(mx.float32)).astype(np.float64) for rows in (a, b))
        energy = (y**2).sum((0, 2)).mean()
        total += ((x - y) ** 2).sum((0, 2)) / energy if energy else 0.0
    return total
