"""Seeded rows of one layer like a model's, and codes of them.

    key before RoPE = mean + noise, eight times as large in OUTLIERS channels of each head;     key = RoPE of it (base BASE)
    key's noise     = n U, n independent with standard deviations e^(-FALL i / D), U a random orthonormal basis of each head, mean square 1
    value           = 0.5 mean + noise + a tenth of the key's noise, channel by channel
    query           = 2 noise over the channel's size, so that scores have a spread of about 2

`tc` and `commvq-N:additive` have tables learnt from CALIBRATED other rows of the same law, with uneven metrics.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench import oracle
from kvtool.bench.threads import in_threads
from veloxquant_mlx.allocators.additive import STAGE_BITS, AdditiveTables, build_additive
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, build_tc, widths_for
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.coded import Growth
from veloxquant_mlx.codecs import CodecPlan, parse_codec
from veloxquant_mlx.codecs._base import Frame
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.transfer.rope_spec import RopeSpec

OUTLIERS, BASE, CALIBRATED = 4, 500000.0, 1024
# White noise leaves a transform code nothing to transform: `tc-2.05` would give bits to 92 % of keys' components, and attention would have
# as many to read. By this fall it gives them to 54 % (8 heads of 128), as in SmolLM2.
FALL = 3.4
LAYER = "rows"


@dataclass(frozen=True)
class Size:
    """B sequences of S tokens, H_q query heads on H_kv KV heads of D; Q queries a head."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    queries: int = 1

    @classmethod
    def parse(cls, text: str, queries: int = 1) -> "Size":
        """B,Hq,Hkv,D,S.

        Raises:
            ValueError: not five positive integers, Hq no multiple of Hkv, an odd D, or more queries than tokens.
        """
        words = text.split(",")
        if len(words) != 5 or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            raise ValueError(f"[bench] shape must be five positive integers B,Hq,Hkv,D,S (1,32,8,128,32768), but got {text!r}.")
        batch, heads, kv_heads, dim, tokens = map(int, words)
        size = cls(batch, heads, kv_heads, dim, tokens, queries)
        if size.heads % size.kv_heads:
            raise ValueError(f"[bench] shape must have Hq a multiple of Hkv, but got {size.heads} and {size.kv_heads}.")
        if size.dim % 2:
            raise ValueError(f"[bench] shape must have an even D, which RoPE turns in pairs, but got {size.dim}.")
        if not 1 <= queries <= size.tokens:
            raise ValueError(f"[bench] queries must be 1 to S = {size.tokens}, but got {queries}.")
        return size

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def values(self) -> int:
        """Keys and values together."""
        return 2 * self.batch * self.kv_heads * self.tokens * self.dim

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)

    def __str__(self) -> str:
        return ",".join(map(str, (self.batch, self.heads, self.kv_heads, self.dim, self.tokens)))


@dataclass(frozen=True, eq=False)
class Rows:
    """q (B, H_q, Q, D), k as cached and v (B, H_kv, S, D), all of one dtype."""

    q: mx.array
    k: mx.array
    v: mx.array


@dataclass(frozen=True, eq=False)
class Law:
    """What all rows of a seed have in common: (H, D) each; `basis` (H, D, D), whose rows are the directions of the keys' noise."""

    k_mean: np.ndarray
    size: np.ndarray
    v_mean: np.ndarray
    basis: np.ndarray

    @classmethod
    def of(cls, heads: int, dim: int, seed: int) -> "Law":
        draw = np.random.default_rng([seed, heads, dim])
        size = np.ones((heads, dim))
        for own in size:
            own[draw.choice(dim, min(OUTLIERS, dim), replace=False)] = 8.0
        k_mean, v_mean = draw.standard_normal((heads, dim)) * size, 0.5 * draw.standard_normal((heads, dim))
        falling = np.exp(-FALL * np.arange(dim) / dim)[:, None]
        basis = falling / np.sqrt(np.square(falling).mean()) * np.linalg.qr(draw.standard_normal((heads, dim, dim)))[0]
        return cls(k_mean, size, v_mean, basis)

    def drawn(self, draw: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys before RoPE and values, (H, S, D) float32."""
        noise, other = draw.standard_normal((2, self.size.shape[0], tokens, self.size.shape[1]), np.float32)
        noise = noise @ self.basis.astype(np.float32)
        v = other + np.float32(0.1) * noise + self.v_mean[:, None].astype(np.float32)
        noise *= self.size[:, None].astype(np.float32)
        noise += self.k_mean[:, None].astype(np.float32)
        return noise, v


def rows(size: Size, dtype: mx.Dtype, seed: int) -> Rows:
    """The rows of a run."""
    drawn = _drawn(size, seed)
    if dtype == mx.float32:
        return drawn
    made = Rows(drawn.q.astype(dtype), drawn.k.astype(dtype), drawn.v.astype(dtype))
    mx.eval(made.q, made.k, made.v)
    return made


@lru_cache(maxsize=1)
def _drawn(size: Size, seed: int) -> Rows:
    """The rows of a run in float32."""
    law = Law.of(size.kv_heads, size.dim, seed)
    draws = ((np.random.default_rng([seed, b, 1]), size.tokens) for b in range(size.batch))
    pairs = in_threads(law.drawn, draws, 16 * size.values // size.batch)
    k, v = (mx.stack([mx.array(pair[i]) for pair in pairs]) for i in (0, 1))
    k = mx.fast.rope(k, size.dim, traditional=False, base=BASE, scale=1.0, offset=0)
    noise = np.random.default_rng([seed, 2]).standard_normal((size.batch, size.kv_heads, size.groups, size.queries, size.dim))
    q = mx.array((2 * noise / law.size[:, None, None]).reshape(size.batch, size.heads, size.queries, size.dim).astype(np.float32))
    made = Rows(q, k, v)
    mx.eval(made.q, made.k, made.v)
    return made


def calibration(heads: int, dim: int, seed: int) -> LayerRows:
    """Other rows of the layer, and what their errors cost."""
    draw = np.random.default_rng([seed, 3])
    k, v = (x.astype(np.float64).swapaxes(0, 1) for x in Law.of(heads, dim, seed).drawn(draw, max(CALIBRATED, 2 * heads * dim)))
    k_metric, v_metric = (np.diag(np.exp(draw.standard_normal(heads * dim))) for _ in "kv")
    return LayerRows(k, v, k_metric, v_metric)


@lru_cache(maxsize=2)
def tables(heads: int, dim: int, seed: int) -> TcTables:
    """What `tc` knows of the layer."""
    return build_tc(calibration(heads, dim, seed))


@lru_cache(maxsize=2)
def words(heads: int, dim: int, seed: int, bits: float) -> AdditiveTables:
    """What `commvq-N:additive` knows of the layer."""
    own = calibration(heads, dim, seed)
    return build_additive(own.k, own.fisher_k, bits)


def plan_of(spec: str, size: Size, seed: int) -> CodecPlan:
    """The codecs of a spec for rows of that size, bound where they are calibrated.

    Raises:
        ValueError: an unknown spec, or one that neither attention nor rows alone can use here.
    """
    plan = parse_codec(spec)
    for codec in (plan.k, plan.v):
        if codec.eager:
            raise ValueError(
                f"[bench] {codec.spec()} is decoded when it is loaded, so attention never reads it: give another codec, such as tc-2.05."
            )
        small = isinstance(codec, CommVqAdditive) and codec.bits * size.dim < STAGE_BITS
        if small or not codec.takes(size.dim):
            raise ValueError(f"[bench] {codec.spec()} does not take D = {size.dim}: give another --shape or codec.")
    tcs = [isinstance(codec, Tc) for codec in (plan.k, plan.v)]
    if any(tcs) and not (all(tcs) and plan.k.spec() == plan.v.spec()):  # bits are shared over keys and values
        raise ValueError(f"[bench] {spec} has tc for one role alone: give tc-N for both.")
    if all(tcs):
        return CodecPlan(_bound(plan.k, "k", size, seed), _bound(plan.v, "v", size, seed), 0, 0, plan.frame)
    k = plan.k.for_rotary(0, size.dim, size.dim)
    if isinstance(k, CommVqAdditive):
        k = k.bind(words(size.kv_heads, size.dim, seed, k.bits), LAYER, "0" * 64)
    return CodecPlan(k, plan.v, 0, 0, plan.frame)


def _bound(codec: Any, role: Any, size: Size, seed: int) -> Tc:
    own = tables(size.kv_heads, size.dim, seed)
    return codec.bind(role, own, widths_for({LAYER: own}, codec.bits)[LAYER], LAYER, "0" * 64, size.tokens)


def rope_of(plan: CodecPlan, dim: int, frame: Frame | None = None) -> RopeSpec | None:
    """The rotation to undo where keys are stored before it: as the plan, or the codec's default, says."""
    stored = frame or plan.frame or plan.k.default_frame("k")
    return RopeSpec("default", dim, base=BASE) if stored == "pre" else None


@lru_cache(maxsize=1)
def blocks(spec: str, size: Size, dtype: mx.Dtype, seed: int, frame: Frame | None = None) -> tuple[Block, ...]:
    """All rows of each sequence as codes, encoded as a cache does."""
    plan, own = plan_of(spec, size, seed), rows(size, dtype, seed)
    growth = Growth(plan.k, plan.v, rope_of(plan, size.dim, frame))
    return tuple(growth.encoded(own.k[b], own.v[b], 0) for b in range(size.batch))


def parts_bytes(made: tuple[Block, ...]) -> int:
    """Bytes of all codes, side information included."""
    return sum(coded.nbytes for block in made for coded in (block.k, block.v))


def independently_decoded(made: tuple[Block, ...]) -> bool:
    """Whether the oracle knows the formulas of both codecs."""
    return all(oracle.independent(codec) for codec in (made[0].k.codec, made[0].v.codec))


def head_rows(made: tuple[Block, ...], halves: str = "") -> tuple[oracle.HeadRows, oracle.HeadRows]:
    """The oracle's keys, as cached, and values of a (sequence, head); the codec decodes what the oracle does not know, once a sequence.

    Args:
        halves: roles, of "kv", whose tables are rounded to halves.
    """
    whole = lru_cache(maxsize=1)(lambda b: _by_codec(made[b]))
    turn = oracle.mlx_angles(made[0].count, made[0].k.shape[2], BASE) if made[0].k.rope is not None else None

    def of(role: str, b: int, h: int) -> Callable[[], np.ndarray]:
        coded: CodedRows = getattr(made[b], role)
        if oracle.independent(coded.codec):
            rows = oracle.decoder(coded.codec, coded.parts, coded.shape, h, role in halves)
        else:
            rows = partial(oracle.to_numpy, oracle.held(whole(b)[role][h]))
        return (lambda: oracle.turned(rows(), turn)) if role == "k" and turn is not None else rows

    return lambda b, h: of("k", b, h), lambda b, h: of("v", b, h)


def _by_codec(block: Block) -> dict[str, mx.array]:
    """Keys before RoPE, where they are stored so, and values by the codec's own decode of all rows."""
    k = block.k.codec.decode(block.k.parts, block.k.shape, mx.float32)
    near = ({"k": k},) if block.v.codec.needs else ()
    return {"k": k, "v": block.v.codec.decode(block.v.parts, block.v.shape, mx.float32, *near)}
