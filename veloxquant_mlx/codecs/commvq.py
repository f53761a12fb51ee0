"""CommVQ: keys before RoPE as complex codewords, one per plane of the rotation, so that codes commute with it (after Li et al. 2025).

A plane is the pair (i, i + dims / 2) that RoPE turns; z = x[i] + j x[i + dims / 2] is its complex number, and so for what it leaves.

    z^ = mean + w c[code]         w: per head and plane; c: shared by the planes of b bits of all heads; all complex
    R_p z^ = e^(j p theta) z^     any shift, base or scaling acts on the planes; the codes stay

Codeword and w multiply as [[x, -y], [y, x]]. |w| is the plane's deviation, its angle the direction in which it spreads most. The planes
share the bits of a row: each next bit goes where it lowers the squared error most. Tables (2^b words for every b up to `table_bits`) come
from EM with hard assignments: by splitting on all planes, then on those that were given b bits. There is no scale per token; the row that
is least like the others (a sink) is kept exact, and bit 0 of its codes says so.

Parts: codes (H, S, ceil(bits D / 8)) U8, the flag and the planes' codes as one `lsb8` stream; widths (H, D / 2) U8: b of each plane; table
(2^(table_bits + 1) - 2, 2) F16, real and imaginary, b by b; gain (H, D / 2, 2) BF16: w; mean (H, D) BF16; exact (H, D) BF16.
A kernel that scores reads bits D / 8 bytes per token and does, per plane, a look-up and a complex multiplication (`CommVq.scores`).

Measured as in `rvq`, keys alone, on tests/texts (code, prose, technical, and their mean; all parts counted in bits, 512 tokens):

    commvq-2    2.14 bits   .0503 .0190 .0205   .0299  .914
    rvq-2       2.28        .0785 .0434 .0408   .0542  .872
    rvq-2:norm:nocenter     .1415 .0965 .1392   .1257  .801   TurboQuant's
    commvq-1    1.11        .1970 .0591 .0903   .1155  .840
    rvq-1       1.28        .4313 .2198 .2339   .2950  .723
    commvq-2, values rvq-4  .0518 .0199 .0213   .0310  .918   rvq-2, values rvq-4: .0560 .879
    commvq-2, 4 first, 32 last exact            .0166  .953   rvq-2: .0380 .905

The exact row matters most: with the row farthest from the median in its place, the sink was often coded and commvq-2 came to .444.
Widths by squared error, no query weights: handing bits out by the error times |w|^-1, as if queries were large where keys are small, was
worse (.0403 against .0244 on prose and technical, without the hull of `allocators.planes`).
The paper's additive codebooks (some ten stages of 64 words of D values a head at 2 bits, 80 KB against 8 KB of codes at 512 tokens of 64)
need tables learnt once for a model, not from the cache: `commvq_additive`, which is far better where there is a calibration.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx.allocators.planes import allocate, distortions, refine, split
from veloxquant_mlx.codecs._base import DTYPES, FLOAT16_MAX, Codec, Frame, Layout, Parts, RoleName, Shape, token_blocks
from veloxquant_mlx.codecs._bits import pack, unpack
from veloxquant_mlx.codecs._codewords import NativeReader, codewords, float32
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.native import converting, encoding, searching
from veloxquant_mlx.transfer.rope_spec import RopeSpec

MAX_TABLE_BITS = 8
MAX_ROPE = 1 << 20
_SAMPLE_ROWS = 1024  # rows that tables, gains and widths are learnt from
_MEAN_TOKENS = 512  # tokens per partial sum of the mean


@dataclass(frozen=True)
class CommVq(Codec):
    """Complex codewords per plane.

    Attributes:
        bits: per value, a multiple of 1/4; a row takes bits D rounded to a whole number.
        first, dims: the rotary entries; dims None is the whole row.
    """

    bits: float
    first: int = 0
    dims: int | None = None
    id: ClassVar[str] = "commvq"
    maps: ClassVar[bool] = True

    @property
    def grows(self) -> bool:
        return False

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if not name.startswith("commvq"):
            return None
        if not re.fullmatch(r"commvq-\d(\.(25|5|75))?", name) or not 0.5 <= float(name[7:]) <= 3.5:
            raise ValueError(f"[codec] {name!r}: write commvq-N with N in 0.5..3.5, a multiple of 0.25 (commvq-2).")
        found = {}
        for word in options:
            if not re.fullmatch(r"(first|dims)=\d{1,6}", word):
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are first=N, dims=N.")
            found[word.partition("=")[0]] = int(word.partition("=")[2])
        if found.get("dims", 2) % 2 or not found.get("dims", 2) or ("first" in found and "dims" not in found):
            raise ValueError(f"[codec] {text!r}: dims must be even and positive, and first goes with it.")
        return Rvq.parse("rvq-4", role) if role == "v" else cls(float(name[7:]), **found)

    def spec(self, role: RoleName | None = None) -> str:
        rotary = "" if self.dims is None else f":first={self.first}:dims={self.dims}"
        return f"commvq-{self.bits:g}{rotary}"

    def to_params(self) -> dict:
        return {"bits": self.bits, "table_bits": self.table_bits, "first": self.first, "dims": self.dims}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        bits, top, first, dims = (params.get(key) for key in ("bits", "table_bits", "first", "dims"))
        if type(bits) not in (int, float) or not 0.5 <= bits <= 3.5 or bits * 4 % 1:
            raise ManifestError(f"bits must be a multiple of 0.25 in 0.5..3.5, but got {bits!r:.40}")
        check_rotary(first, dims)
        codec = cls(float(bits), first, dims)
        if type(top) is not int or top != codec.table_bits:
            raise ManifestError(f"table_bits must be {codec.table_bits} for {bits:g} bits, but got {top!r:.40}")
        return codec

    @property
    def table_bits(self) -> int:
        """Most bits of a plane."""
        return min(MAX_TABLE_BITS, math.ceil(2 * self.bits) + 2)

    def takes(self, dim: int) -> bool:
        return dim % 2 == 0 and self.first + (self.dims or 2) <= dim

    def for_rotary(self, first: int, dims: int, dim: int) -> Self:
        return self if (first, dims) == (0, dim) else replace(self, first=first, dims=dims)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        return {
            "codes": ("U8", (heads, tokens, -(-self._row_bits(dim) // 8))),
            "widths": ("U8", (heads, dim // 2)),
            "table": ("F16", ((2 << self.table_bits) - 2, 2)),
            "gain": ("BF16", (heads, dim // 2, 2)),
            "mean": ("BF16", (heads, dim)),
            "exact": ("BF16", (heads, dim)),
        }

    def _row_bits(self, dim: int) -> int:
        return math.floor(self.bits * dim + 0.5)

    def planes(self, dim: int) -> np.ndarray:
        """Entries of each plane's real and imaginary part, (2, D / 2): the rotary planes first.

        Raises:
            ValueError: an odd D, or rotary entries beyond it.
        """
        dims = dim if self.dims is None else self.dims
        if not self.takes(dim):
            raise ValueError(f"[{self.id}] head_dim {dim} does not hold planes of entries {self.first} to {self.first + dims}.")
        rotary = np.arange(self.first, self.first + dims)
        others = np.setdiff1d(np.arange(dim), rotary)
        return np.concatenate([rotary.reshape(2, -1), others.reshape(2, -1)], axis=1)

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        planes = self.planes(x.shape[2])
        if x.size == 0:
            return {part: mx.zeros(shape, DTYPES[dtype]) for part, (dtype, shape) in self.layout(x.shape, x.dtype).items()}
        self._check_finite(x)
        parts, far = self._learn(x, planes)
        if searching.takes(x):
            parts["codes"] = self._searched(x, parts, far, planes)
            return parts
        blocks = []
        for tokens in token_blocks(x.shape):
            blocks.append(self._encode_block(x[:, tokens].astype(mx.float32), tokens.start, far, parts, planes))
            mx.eval(blocks[-1])
        parts["codes"] = mx.concatenate(blocks, axis=1)
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        order = mx.array(np.argsort(self.planes(shape[2]).reshape(-1)).astype(np.uint32))
        out = mx.zeros(shape, dtype)
        words = _words(parts["table"])
        gain = parts["gain"].astype(mx.float32)[:, None]
        for tokens in token_blocks(shape):
            index, exact = self._indices(parts, tokens, shape[2])
            word = words[index]
            z = mx.concatenate(_times(gain[..., 0], gain[..., 1], word[..., 0], word[..., 1]), axis=-1)
            block = mx.take(z, order, axis=-1) + parts["mean"].astype(mx.float32)[:, None]
            block = mx.where(exact[..., None], parts["exact"].astype(mx.float32)[:, None], block)
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: Parts, shape: Shape) -> NativeReader:
        parts = self._checked_parts(parts, self.layout(shape, mx.float32))
        self._checked_widths(parts, shape[2])
        return NativeReader(self, parts, shape)

    def native_rows(self, parts: Parts, shape: Shape) -> Any:
        """The rows as the native back end reads them: of every plane its codewords times w, with the mean."""
        dim = shape[2]
        widths, planes, gain = self._checked_widths(parts, dim), self.planes(dim), float32(parts["gain"])
        words = np.concatenate([np.zeros((1, 2)), float32(parts["table"])]) @ (1, 1j)
        w, mean = gain[..., 0] + 1j * gain[..., 1], float32(parts["mean"])[:, planes]
        values = [
            np.resize(part, max(16, 1 << b))
            for (h, i), b in np.ndenumerate(widths)
            for z in [w[h, i] * words[(1 << b) - 1 : (2 << b) - 1] + complex(*mean[h, :, i])]
            for part in (z.real, z.imag)
        ]
        sizes = 2 * np.maximum(16, 1 << widths.reshape(-1))
        table, place = (np.cumsum(sizes) - sizes).reshape(widths.shape), 1 + np.cumsum(widths, axis=1) - widths
        flat = np.concatenate([np.zeros(0), *values]).astype(np.float32)
        return codewords(shape, "planes", parts["codes"], 2, place, widths, table, flat, planes.reshape(-1), float32(parts["exact"]))

    def scores(self, parts: dict[str, mx.array], shape: Shape, queries: mx.array, positions: np.ndarray, rope: RopeSpec | None) -> mx.array:
        """<query, R_p x^> of every token from its codes, without decoding a key.

            sum over planes of Re(e^(j p theta) (conj(q) mean + T[code])),   T[c] = conj(q) w c, made once per query

        Args:
            parts: of keys coded before RoPE.
            shape: (H, S, D) of them.
            queries: (H, G, D) float, G query heads of each KV head, rotated to their own position; rotary entries in half-split order.
            positions: (S,) int, of the keys.
            rope: rotation of the live keys, or None.

        Returns:
            (H, G, S) float32, not scaled by 1 / sqrt(D).

        Raises:
            ValueError: shapes that do not fit, or a rope on other planes than the codec's.

        Angles are float64 (`rotate`'s "exact"); the float32 angles of a live model differ from them at large positions.
        """
        heads, tokens, dim = shape
        parts = self._checked_parts(parts, self.layout(shape, mx.float32))
        planes = self.planes(dim)
        rotary = (self.first, dim if self.dims is None else self.dims)
        if rope is not None and (rope.first, rope.dims) != rotary:
            raise ValueError(
                f"[{self.id}] the codes' planes are on entries (first, dims) {rotary}, but RoPE is on {(rope.first, rope.dims)}."
            )
        if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim) or np.shape(positions) != (tokens,):
            got = f"{tuple(queries.shape)} and {np.shape(positions)}"
            raise ValueError(f"[{self.id}] queries must be ({heads}, G, {dim}) and positions ({tokens},), but got {got}.")
        theta, size = np.zeros(dim // 2), np.ones(dim // 2)
        if rope is not None:
            theta[: rope.dims // 2], size[: rope.dims // 2] = rope.frequencies, rope.magnitude
        q = [mx.take(queries.astype(mx.float32), mx.array(entries), axis=-1) for entries in planes]
        q = [q[0] * mx.array(size.astype(np.float32)), -q[1] * mx.array(size.astype(np.float32))]

        def product(row: mx.array) -> list[mx.array]:
            """conj(q) z of one row per head, (H, D) -> (H, G, D / 2) twice."""
            row = row.astype(mx.float32)
            return _times(*q, *(mx.take(row, mx.array(entries), axis=-1)[:, None] for entries in planes))

        mean, exact = product(parts["mean"]), product(parts["exact"])
        gain, words = parts["gain"].astype(mx.float32)[:, None], _words(parts["table"])
        turned = _times(*q, gain[..., 0], gain[..., 1])
        tables = _times(turned[0][..., None], turned[1][..., None], words[:, 0], words[:, 1])  # (H, G, D / 2, words)
        out = []
        for block in token_blocks((heads * queries.shape[1], tokens, dim)):
            index, kept = self._indices(parts, block, dim)
            index, kept = index.swapaxes(1, 2)[:, None], kept[:, None, None]  # (H, 1, D / 2, S), (H, 1, 1, S)
            z = [
                mx.where(kept, far[..., None], mx.take_along_axis(table, index, axis=-1) + middle[..., None])
                for table, middle, far in zip(tables, mean, exact, strict=True)
            ]
            angle = theta[:, None] * np.asarray(positions, np.float64)[block]
            turn = [mx.array(part.astype(np.float32)) for part in (np.cos(angle), np.sin(angle))]
            out.append(mx.sum(turn[0] * z[0] - turn[1] * z[1], axis=2))
            mx.eval(out[-1])
        return mx.concatenate(out, axis=-1) if out else mx.zeros((*queries.shape[:2], 0))

    def _learn(self, x: mx.array, planes: np.ndarray) -> tuple[dict[str, mx.array], mx.array]:
        """All parts but the codes, and the exact row of each head, (H, 1)."""
        _, tokens, dim = x.shape
        picked = np.unique(np.linspace(0, tokens - 1, min(tokens, _SAMPLE_ROWS)).round().astype(np.uint32))
        sample = np.array(x[:, mx.array(picked)].astype(mx.float32)).astype(np.float64)
        far = self._farthest(x, sample)
        # Rows of the sample that are not the exact one count; all rows do where there is no other.
        counted = (picked != np.array(far)).astype(np.float64)
        mean = _mean(x, far)
        stored = np.array(mean.astype(mx.float32)).astype(np.float64)
        rows = ((sample - stored[:, None]) * counted[..., None])[..., planes]  # (H, rows, 2, D / 2)
        z = rows[..., 0, :] + 1j * rows[..., 1, :]
        number = np.maximum(counted.sum(axis=1), 1)[:, None]
        power, spread = (np.abs(z) ** 2).sum(axis=1) / number, (z**2).sum(axis=1) / number
        gain = np.sqrt(power / 2) * np.exp(0.5j * np.angle(spread))
        gain_part = mx.array(np.stack([gain.real, gain.imag], axis=-1).astype(np.float32)).astype(mx.bfloat16)
        w = np.array(gain_part.astype(mx.float32)).astype(np.float64)
        w = w[..., 0] + 1j * w[..., 1]
        weight = np.abs(w) ** 2
        points = z * np.where(weight > 0, w.conj() / np.maximum(weight, 1e-300), 0)[:, None]
        kept = counted[..., None] * (weight > 0)[:, None] > 0
        tables = split(points[kept], self.table_bits)
        cost = distortions(points * kept, tables) * weight
        widths = allocate(cost, self._row_bits(dim) - 1)
        tables = refine(points, kept, widths, tables)
        flat = np.concatenate(tables)
        parts = {
            "widths": mx.array(widths.astype(np.uint8)),
            "table": mx.array(np.stack([flat.real, flat.imag], axis=-1).astype(np.float16)),
            "gain": gain_part,
            "mean": mean,
            "exact": mx.take_along_axis(x, far[..., None], axis=1)[:, 0].astype(mx.bfloat16),
        }
        return parts, far

    def _farthest(self, x: mx.array, sample: np.ndarray) -> mx.array:
        """Row of each head that is least like the others, (H, 1) uint32: the largest far^2 / near.

        far: mean of |x - median| / median deviation; near: mean of |x| / median deviation. A sink's key lies near zero and not near the
        others; what is coded of it should be in proportion to its own size, for most queries look at it.
        """
        middle = _medians(sample)
        deviation = np.abs(sample - middle)
        unit = _medians(deviation)
        # A dimension that is constant but for a few rows has a median deviation of 0: the mean one, then.
        unit = np.where(unit > 0, unit, deviation.mean(axis=1, keepdims=True))
        inverse = np.where(unit > 1e-30, 1 / np.maximum(unit, 1e-30), 0)
        if searching.takes(x):
            return mx.array(searching.farness(x, middle[:, 0], inverse[:, 0]).argmax(axis=1, keepdims=True).astype(np.uint32))
        middle, inverse = (mx.array(a.astype(np.float32)) for a in (middle, inverse))
        distances = []
        for tokens in token_blocks(x.shape):
            rows = x[:, tokens].astype(mx.float32)
            far, near = (mx.mean(mx.minimum(mx.abs(part) * inverse, 1e15), axis=-1) for part in (rows - middle, rows))
            distances.append(far * far / mx.maximum(near, 1e-6))
            mx.eval(distances[-1])
        return mx.argmax(mx.concatenate(distances, axis=1), axis=1, keepdims=True).astype(mx.uint32)

    def _encode_block(self, x: mx.array, start: int, far: mx.array, parts: dict[str, mx.array], planes: np.ndarray) -> mx.array:
        centred = x - parts["mean"].astype(mx.float32)[:, None]
        real, imaginary = (mx.take(centred, mx.array(entries), axis=-1) for entries in planes)
        a, b, norm = (part[:, None] for part in _inverse(parts["gain"]))
        u, v = (part * norm for part in _times(a, b, real, imaginary))
        exact = (mx.arange(start, start + x.shape[1], dtype=mx.uint32)[None] == far).astype(mx.uint8)
        widths, table = parts["widths"], np.array(parts["table"].astype(mx.float32))
        codes = mx.zeros(u.shape, mx.uint8)
        for width in np.unique(np.array(widths)).tolist():
            best, code = mx.full(u.shape, mx.inf), mx.zeros(u.shape, mx.uint8)
            for index, (re_, im_) in enumerate(table[(1 << width) - 2 : (2 << width) - 2].tolist() if width else []):
                distance = mx.square(u - re_) + mx.square(v - im_)
                code, best = mx.where(distance < best, mx.array(index, mx.uint8), code), mx.minimum(distance, best)
                if index % 8 == 7:
                    mx.eval(code, best)  # one distance of a block at a time, not those of a whole table
            codes = mx.where(widths[:, None] == width, code, codes)
            mx.eval(codes)
        plane, shift = self._streams(widths, x.shape[2])
        stream = mx.take_along_axis(mx.concatenate([codes, exact[..., None]], axis=-1), plane[:, None], axis=-1) >> shift[:, None] & 1
        # Contiguous: packed bytes of one bit are a view of words eight times their size, which would stay until all blocks are joined.
        return mx.contiguous(pack(stream, 1))

    def _searched(self, x: mx.array, parts: Parts, far: mx.array, planes: np.ndarray) -> mx.array:
        """The part `codes`, by the native back end; `far` (H, 1): the exact rows."""
        words = np.concatenate([np.zeros((1, 2), np.float32), float32(parts["table"])])
        turn = np.stack([np.array(part) for part in _inverse(parts["gain"])], axis=-1)
        given = float32(parts["mean"]), planes, turn, words, np.array(parts["widths"]), np.array(far)[:, 0]
        return searching.coded_planes(x, *given, -(-self._row_bits(x.shape[2]) // 8))

    def _streams(self, widths: mx.array, dim: int) -> tuple[mx.array, mx.array]:
        """Plane (D / 2: the flag) that each bit of a row belongs to, and which bit of its code; a spare bit is bit 7 of the flag."""
        plane, shift = (
            np.full((len(widths), self._row_bits(dim)), dim // 2, np.uint32),
            np.full((len(widths), self._row_bits(dim)), 7, np.uint8),
        )
        shift[:, 0] = 0
        for head, row in enumerate(np.array(widths).astype(int)):
            count = int(row.sum())
            plane[head, 1 : 1 + count] = np.repeat(np.arange(dim // 2), row)
            shift[head, 1 : 1 + count] = np.arange(count) - np.repeat(np.cumsum(row) - row, row)
        return mx.array(plane), mx.array(shift)

    def _indices(self, parts: dict[str, mx.array], tokens: slice, dim: int) -> tuple[mx.array, mx.array]:
        """Word of each plane in `_words` order, (H, S, D / 2) uint32, and whether the row is the exact one, (H, S)."""
        widths = self._checked_widths(parts, dim)
        stream = unpack(parts["codes"][:, tokens], 1, self._row_bits(dim))
        offset = 1 + np.cumsum(widths, axis=1) - widths
        index = mx.array(((1 << widths) - 1).astype(np.uint32))[:, None]
        for bit in range(int(widths.max(initial=0))):
            at = mx.array(np.minimum(offset + bit, self._row_bits(dim) - 1).astype(np.uint32))[:, None]
            index = (
                index
                + mx.take_along_axis(stream, at, axis=-1).astype(mx.uint32) * mx.array(((widths > bit) << bit).astype(np.uint32))[:, None]
            )
        return mx.broadcast_to(index, (*stream.shape[:2], dim // 2)), stream[..., 0] == 1

    def _checked_widths(self, parts: Parts, dim: int) -> np.ndarray:
        """The part `widths`, int64."""
        widths = np.array(parts["widths"][...]).astype(np.int64)
        if widths.size and (widths.max() > self.table_bits or (widths.sum(axis=1) >= self._row_bits(dim)).any()):
            most = f"at most {self.table_bits} and less than {self._row_bits(dim)} in sum per head"
            raise ManifestError(f"[{self.id}] part 'widths' must be {most}, but got {widths.max()} and {widths.sum(axis=1).max()}.")
        return widths


def _times(a: mx.array, b: mx.array, c: mx.array, d: mx.array) -> list[mx.array]:
    """(a + jb)(c + jd), real and imaginary."""
    return [a * c - b * d, a * d + b * c]


def _inverse(gain: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """1 / w of (H, D / 2, 2) bfloat16: real and imaginary part, and a factor; in two steps, for |w|^2 may leave float32's range."""
    gain = gain.astype(mx.float32)
    size = mx.maximum(mx.abs(gain[..., 0]), mx.abs(gain[..., 1]))
    inverse = mx.where(size > 0, 1 / size, 0.0)
    a, b = gain[..., 0] * inverse, -gain[..., 1] * inverse
    return a, b, mx.where(size > 0, inverse / (a * a + b * b), 0.0)


def _medians(rows: np.ndarray) -> np.ndarray:
    """Over the rows, (H, n, D) float64 -> (H, 1, D); NumPy's own takes five times as long."""
    columns = np.partition(np.ascontiguousarray(rows.swapaxes(1, 2)), rows.shape[1] // 2, axis=-1)
    upper = columns[..., rows.shape[1] // 2]
    lower = upper if rows.shape[1] % 2 else columns[..., : rows.shape[1] // 2].max(axis=-1)
    return ((lower + upper) / 2)[:, None]


def _words(table: mx.array) -> mx.array:
    """The table behind the one word of a plane of no bits, 0."""
    return mx.concatenate([mx.zeros((1, 2)), table.astype(mx.float32)])


def _mean(x: mx.array, far: mx.array) -> mx.array:
    """(H, D) bfloat16: over the rows but the exact one. The same partial sums whatever the block size."""
    heads, tokens, dim = x.shape
    if encoding.takes(x):
        sums = np.zeros((heads, dim))
        for h, row in enumerate(np.array(far)[:, 0].tolist()):
            # A row far larger than the others would leave nothing of them in a sum that it is taken from again.
            sides = x[h : h + 1, :row], x[h : h + 1, row + 1 :]
            sums[h] = sum(encoding.sum_over_tokens(side)[0] for side in sides if side.size)
        return mx.array((sums / max(1, tokens - 1)).astype(np.float32)).astype(mx.bfloat16)
    total = mx.zeros((heads, dim), mx.float32)
    for start in range(0, tokens, _MEAN_TOKENS):
        rows = x[:, start : start + _MEAN_TOKENS].astype(mx.float32)
        other = mx.arange(start, start + rows.shape[1], dtype=mx.uint32)[None] != far
        total = total + mx.sum(mx.where(other[..., None], rows, 0.0) / max(1, tokens - 1), axis=1)
        mx.eval(total)
    return total.astype(mx.bfloat16)


def check_rotary(first: object, dims: object) -> None:
    """Raise ManifestError unless these are the rotary entries of a row: where they begin, and how many, or None for all."""
    if type(first) is not int or not 0 <= first <= MAX_ROPE:
        raise ManifestError(f"first must be an integer in 0..{MAX_ROPE}, but got {first!r:.40}")
    if dims is not None and (type(dims) is not int or not 0 < dims <= MAX_ROPE or dims % 2):
        raise ManifestError(f"dims must be null or an even integer in 2..{MAX_ROPE}, but got {dims!r:.40}")
