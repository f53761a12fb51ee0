"""The smallest rate of a codec at which a prompt's own KL stays below a limit, found by measuring.

KL(own || codec) is of the next-token distributions over the prompt's own tokens, teacher-forced with every row coded as it leaves the exact
window (`streaming`, see `kvtool.sweeping`), so that errors propagate as they will in use. Rates are tried by bisection on a ladder: KL
falls with the rate but for noise, and the rate that is taken was itself measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formats.errors import QualityError
from kvtool.arms import TextArms
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel
from kvtool.roundtrip import parse_roundtrip
from veloxquant_mlx.codecs import CodecPlan, parse_codec

LADDERS = {
    "tc": ("1.25", "1.5", "1.75", "2", "2.25", "2.5", "3", "3.5", "4", "5", "6"),
    "tcz": ("0.5", "0.6", "0.75", "0.9", "1.1", "1.3", "1.6", "2", "2.5", "3"),
}
LEAST_SCORED = 32  # tokens that KL is a mean of
MOST_TOKENS = 1024  # of the prompt, from its beginning, that are run: the model's own logits on them are held
CHUNK = 512  # tokens a forward: whole chunks of tcz


@dataclass(frozen=True)
class Quality:
    """What was found.

    Attributes:
        plan: the codec at the rate taken.
        kl: its measured KL, nats a token, mean over `positions` tokens of the prompt.
        limit: what was asked for.
        positions: tokens scored.
        tried: (codec spec, measured KL) in the order tried.
    """

    plan: CodecPlan
    kl: float
    limit: float
    positions: int
    tried: tuple[tuple[str, float], ...]

    def record(self) -> dict[str, float | int | str]:
        """As the file's quality record holds it."""
        return {"kl": float(f"{self.kl:.4g}"), "kl_limit": self.limit, "kl_positions": self.positions, "kl_protocol": "streaming"}


def smallest_rate(
    model: LoadedModel,
    snapshot: Snapshot,
    limit: float,
    *,
    family: str = "tcz",
    plan: CodecPlan,
    calibration: Calibration | None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """The smallest rate of a family whose measured KL is at most `limit`.

    Args:
        model: the model that computed the snapshot.
        snapshot: its tokens are the prompt.
        limit: nats a token.
        family: "tc" or "tcz".
        plan: exact rows; its codecs are of no account.
        calibration: of the model, or None: tables are learnt from the prompt's cache (tc alone).
        progress: called with (rates tried, rates to try at most).
    Raises:
        ValueError: the family is unknown, tcz without a calibration, tokens not known or too few.
        QualityError: the highest rate's KL is above the limit.
        IncompatibleError: a layer has no full attention.
    """
    if family not in LADDERS:
        raise ValueError(f"[quality] family must be one of {', '.join(LADDERS)}, but got {family!r}.")
    if not limit > 0:
        raise ValueError(f"[quality] kl must be positive, but got {limit}.")
    if family == "tcz" and calibration is None:
        raise ValueError("[quality] tcz needs a calibration of the model: make one with kvtool calibrate, or give --codec tc-2.")
    ids = list(snapshot.tokens or ())[: MOST_TOKENS + 1]
    before = plan.sink + plan.recent + 1
    if len(ids) < before + LEAST_SCORED + 1:
        raise ValueError(
            f"[quality] a prompt of {len(ids)} tokens is too short to measure on: {before + LEAST_SCORED + 1} are needed with "
            f"{plan.sink} + {plan.recent} kept exact."
        )
    base = TextArms(model, "prompt", ids, "streaming", before, CHUNK, calibration)
    ladder = LADDERS[family]
    tried: dict[int, tuple[str, float]] = {}
    most = 1 + len(ladder).bit_length()

    def measure(i: int) -> float:
        if i not in tried:
            spec = _at(plan, family, ladder[i]).full_spec()
            arm = base.arm(parse_roundtrip(spec))
            tried[i] = (spec, float("inf") if arm.failed else float(np.mean(arm.kl)))
            if progress is not None:
                progress(len(tried), max(most, len(tried)))
        return tried[i][1]

    low, high = -1, len(ladder) - 1
    if measure(high) > limit:
        spec, kl = tried[high]
        raise QualityError(f"KL is {kl:.3g} nats at the highest rate ({spec}), above the limit of {limit:g}", hint="use rvq-8 or raw")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if measure(middle) <= limit else (middle, high)
    return Quality(_at(plan, family, ladder[high]), tried[high][1], limit, base.positions - before, tuple(tried.values()))


def _at(plan: CodecPlan, family: str, rate: str) -> CodecPlan:
    found = parse_codec(f"{family}-{rate}")
    return replace(found, sink=plan.sink, recent=plan.recent)
