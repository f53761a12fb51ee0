"""commvq-N:additive: keys before RoPE as sums of complex words, learnt from a calibration (after CommVQ, Li et al. 2025).

    k^ = mean + sum over the stages r of the head of W_r[code_r],    W_r[c] = sum over the components i of r of words[i, c] back[i]
    R_p k^ = R_p mean + sum of R_p W_r[code_r]                       a word is a complex number per plane: codes stay as p and R change

A stage has 256 words, and a row a byte for each stage: N D / 8 on average over the heads of all layers that were bound together. What the
words are, and why the stages do not depend on each other, is in `allocators.additive`. Tables are a calibration's, named by its digest, or
carried as 8-bit parts. There is no scale per token. Values: `rvq-4`, as `commvq`.

Parts: codes (1, S, n) U8, n the stages of all heads, heads outermost. Carried: mean (H, D) F32; back (H, D, D), words (H, D, 256) I8 with
steps (H, D) F32; stage (H, D) U8.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.allocators.additive import WORDS, AdditiveTables, most_stages, nearest
from veloxquant_mlx.allocators.carried_tables import dequantised, quantised
from veloxquant_mlx.allocators.transforms import inverse
from veloxquant_mlx.codecs._base import FLOAT16_MAX, Codec, Frame, Given, Layout, Parts, RoleName, Shape, token_blocks
from veloxquant_mlx.codecs._codewords import codewords
from veloxquant_mlx.codecs._reading import RowReader
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.metal._component_operand import ComponentKeys, Components, Quantisers
from veloxquant_mlx.native import converting
from veloxquant_mlx.transfer.rope_spec import RopeSpec

RATES = (1.0, 1.5, 2.0, 3.0)
CARRIED = "carried"
MAX_HEADS = 1024
MAX_DIM = 1024
MAX_NAME = 64
_FAR = 1e18  # a row is that many deviations from the mean at most


@dataclass(frozen=True)
class CommVqAdditive(Codec):
    """Sums of complex words: the keys of one layer.

    Attributes:
        bits: average per value over the layers that were bound together.
        carry: whether tables go into the file; else `digest` names the calibration they are from.
        layer: its name in the calibration; None until bound.
        digest: of the calibration.
        stages: bytes of a row of each head; None until bound.
        dim: D; None until bound.
        tables: of the calibration, not part of what the codec is.
    """

    bits: float
    carry: bool = False
    layer: str | None = None
    digest: str | None = None
    stages: tuple[int, ...] | None = None
    dim: int | None = None
    tables: AdditiveTables | None = field(default=None, compare=False, repr=False)
    id: ClassVar[str] = "additive"
    maps: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if not name.startswith("commvq") or "additive" not in options:
            return None
        if name.removeprefix("commvq-") not in {f"{rate:g}" for rate in RATES}:
            rates = ", ".join(f"{rate:g}" for rate in RATES)
            raise ValueError(f"[codec] {text!r}: write commvq-N:additive with N one of {rates}.")
        if len(set(options)) < len(options) or not set(options) <= {"additive", "carry"}:
            raise ValueError(f"[codec] {text!r}: unknown options; with additive there is carry.")
        return Rvq.parse("rvq-4", role) if role == "v" else cls(float(name[7:]), "carry" in options)

    def spec(self, role: RoleName | None = None) -> str:
        return f"commvq-{self.bits:g}:additive{':carry' if self.carry else ''}"

    @property
    def design(self) -> float:
        """Rate that the tables are made for: they differ from rate to rate."""
        return self.bits

    def bind(self, tables: AdditiveTables, layer: str, digest: str | None = None) -> Self:
        """The codec of one layer's keys.

        Args:
            layer: its name in the calibration.
            digest: of the calibration; None, or `carry`, puts the tables into the file.
        """
        carry = self.carry or digest is None
        bound = replace(self, carry=carry, layer=layer, digest=None if carry else digest, stages=tables.stages, dim=tables.dim)
        return bound.with_tables(tables)

    @property
    def grows(self) -> bool:
        return not self.carry

    @property
    def calibration(self) -> str | None:
        return self.digest if self.tables is None else None

    def with_tables(self, tables: Any) -> Self:
        heads, dim = self._size()
        fitting = isinstance(tables, AdditiveTables) and (tables.heads, tables.dim, tables.stages) == (heads, dim, self.stages)
        if not fitting:
            got = f"{(tables.heads, tables.dim)}, {tables.stages}" if isinstance(tables, AdditiveTables) else type(tables).__name__
            wanted = f"AdditiveTables of (H, D) = ({heads}, {dim}) and stages {self.stages}"
            raise ValueError(f"[{self.id}] tables of layer {self.layer!r} must be {wanted}, but got {got}.")
        return replace(self, tables=tables)

    def to_params(self) -> dict:
        _, dim = self._size()
        tables = CARRIED if self.carry else self.digest
        return {"bits": self.bits, "stages": list(self.stages or ()), "dim": dim, "tables": tables, "layer": self.layer}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        bits, stages, dim, tables, layer = (params.get(key) for key in ("bits", "stages", "dim", "tables", "layer"))
        if type(bits) not in (int, float) or bits not in RATES:
            raise ManifestError(f"bits must be one of {RATES}, but got {bits!r:.40}")
        if type(dim) is not int or not 1 <= dim <= MAX_DIM:
            raise ManifestError(f"dim must be an integer in 1..{MAX_DIM}, but got {dim!r:.40}")
        most = most_stages(dim)
        if not isinstance(stages, list) or not 1 <= len(stages) <= MAX_HEADS or not all(type(n) is int and 1 <= n <= most for n in stages):
            raise ManifestError(f"stages must be 1..{MAX_HEADS} integers in 1..{most}, but got {stages!r:.40}")
        if tables != CARRIED and not (isinstance(tables, str) and re.fullmatch(r"[0-9a-f]{64}", tables)):
            raise ManifestError(f"tables must be {CARRIED!r} or 64 hexadecimal digits, but got {tables!r:.80}")
        if not isinstance(layer, str) or not 1 <= len(layer) <= MAX_NAME:
            raise ManifestError(f"layer must be a name of 1..{MAX_NAME} characters, but got {layer!r:.80}")
        carry = tables == CARRIED
        return cls(float(bits), carry, layer, None if carry else tables, tuple(stages), dim)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre"

    def takes(self, dim: int) -> bool:
        return 0 < dim <= MAX_DIM and self.dim in (None, dim)

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        if (heads, dim) != self._size():
            raise ValueError(f"[{self.id}] rows must have (H, D) = {self._size()}, but got ({heads}, {dim}).")
        parts: Layout = {"codes": ("U8", (1, tokens, sum(self.stages or ())))}
        if self.carry:
            parts |= {"mean": ("F32", (heads, dim)), "back": ("I8", (heads, dim, dim)), "back_step": ("F32", (heads, dim))}
            parts |= {"words": ("I8", (heads, dim, WORDS)), "words_step": ("F32", (heads, dim)), "stage": ("U8", (heads, dim))}
        return parts

    def encode(self, x: mx.array, given: Given | None = None) -> dict[str, mx.array]:
        self._check_input(x)
        self.layout(x.shape, x.dtype)
        tables = self._own_tables()
        self._check_finite(x)
        parts = {name: mx.array(part) for name, part in self._rounded.items()}
        reader = self.reader(parts)
        forward, weights = inverse(reader.back), tables.weights()
        codes = np.zeros((1, x.shape[1], sum(self.stages or ())), np.uint8)
        for tokens in token_blocks(x.shape):
            block = np.array(x[:, tokens].astype(mx.float32)).astype(np.float64)
            column = 0
            for h, count in enumerate(self.stages or ()):
                y = (((block[h] - reader.mean[h]) @ forward[h]).clip(-_FAR, _FAR) * weights[h]).astype(np.float32)
                for r in range(count):
                    own = reader.stage[h] == r
                    codes[0, tokens, column] = nearest(y[:, own], (reader.words[h, own] * weights[h, own, None]).T)
                    column += 1
        parts["codes"] = mx.array(codes)
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype, given: Given | None = None) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        reader = self.reader(parts)
        words, back, mean = (mx.array(table) for table in (reader.words.reshape(-1), reader.back, reader.mean[:, None]))
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            component = mx.take(parts["codes"][0, tokens], reader.columns, axis=-1).astype(mx.uint32) + reader.rows
            block = mx.take(words, component.reshape(-1, shape[0], shape[2]).swapaxes(0, 1)) @ back + mean
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: Parts, shape: Shape) -> "AdditiveReader":
        return AdditiveReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def scores(self, parts: dict[str, mx.array], shape: Shape, queries: mx.array, positions: np.ndarray, rope: RopeSpec | None) -> mx.array:
        """<query, R_p k^> of every token from its codes; what is summed over stages are whole words, made once: no basis, no search.

        A token takes n D additions for all its KV heads of n stages in sum, a rotation, and D multiply-adds a query head; decoding first
        takes D^2 multiply-adds a KV head in their place.

        Args:
            parts: of keys coded before RoPE.
            shape: (H, S, D) of them.
            queries: (H, G, D) float, G query heads of each KV head, rotated to their own position; rotary entries in half-split order.
            positions: (S,) int, of the keys.
            rope: rotation of the live keys, or None.

        Returns:
            (H, G, S) float32, not scaled by 1 / sqrt(D).

        Raises:
            ValueError: shapes that do not fit.

        Angles are float64; the float32 angles of a live model differ from them at large positions.
        """
        heads, tokens, dim = shape
        parts = self._checked_parts(parts, self.layout(shape, mx.float32))
        if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim) or np.shape(positions) != (tokens,):
            got = f"{tuple(queries.shape)} and {np.shape(positions)}"
            raise ValueError(f"[{self.id}] queries must be ({heads}, G, {dim}) and positions ({tokens},), but got {got}.")
        reader, queries = self.reader(parts), queries.astype(mx.float32)
        first, half = (0, 0) if rope is None else (rope.first, rope.dims // 2)
        if first + 2 * half > dim:
            raise ValueError(f"[{self.id}] rope must turn entries below {dim}, but turns {first} to {first + 2 * half}.")
        out = []
        for block in token_blocks((1, tokens, sum(self.stages or ()) * dim)):
            codes, column, rows = parts["codes"][0, block].astype(mx.uint32), 0, []
            for h, count in enumerate(self.stages or ()):
                index = codes[:, column : column + count] + mx.arange(count, dtype=mx.uint32) * WORDS
                rows.append(mx.sum(mx.take(reader.sums[h], index, axis=0), axis=1) + mx.array(reader.mean[h]))
                column += count
            k = mx.stack(rows)
            if rope is not None:
                angle = np.asarray(positions, np.float64)[block, None] * rope.frequencies
                cos, sin = (mx.array((rope.magnitude * part).astype(np.float32)) for part in (np.cos(angle), np.sin(angle)))
                a, b = k[..., first : first + half], k[..., first + half : first + 2 * half]
                k = mx.concatenate([k[..., :first], a * cos - b * sin, a * sin + b * cos, k[..., first + 2 * half :]], axis=-1)
            out.append(queries @ k.swapaxes(1, 2))
            mx.eval(out[-1])
        return mx.concatenate(out, axis=-1) if out else mx.zeros((*queries.shape[:2], 0))

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return None

    def reader(self, parts: dict[str, mx.array]) -> "Reader":
        """The tables that codes are read with.

        Raises:
            ValueError: tables are missing.
            ManifestError: carried tables that are not finite, or of other stages than the parameters say.
        """
        if not self.carry:
            return self._own_reader
        stages = np.array(self.stages)
        mean, stage = np.array(parts["mean"][...]), np.array(parts["stage"][...])
        if (stage >= stages[:, None]).any():
            raise ManifestError(f"[{self.id}] part 'stage' must be below {self.stages} head by head, but got {stage.max(axis=1).tolist()}.")
        full = {name: _wide(np.array(parts[name][...]), np.array(parts[f"{name}_step"][...])) for name in ("back", "words")}
        for name, table in (("mean", mean), ("back_step", full["back"]), ("words_step", full["words"])):
            if not np.isfinite(table).all():
                raise ManifestError(
                    f"[{self.id}] part {name!r} must be finite, but {np.count_nonzero(~np.isfinite(table))} values are not."
                )
        return Reader(mean, full["back"], stage, full["words"], self.stages or ())

    def _size(self) -> tuple[int, int]:
        """H and D."""
        if self.stages is None or self.dim is None:
            raise ValueError(f"[{self.id}] {self.spec()} needs a calibration: it is bound to each layer's tables first.")
        return len(self.stages), self.dim

    def _own_tables(self) -> AdditiveTables:
        if self.tables is None:
            raise ValueError(f"[{self.id}] layer {self.layer!r} needs the calibration {self.digest}: give its tables (with_tables).")
        return self.tables

    @cached_property
    def _own_reader(self) -> "Reader":
        tables = self._own_tables()
        return Reader(tables.mean, tables.back, tables.stage, tables.words.astype(np.float32), tables.stages)

    @cached_property
    def _rounded(self) -> dict[str, np.ndarray]:
        """The parts of carried tables; none where a calibration is named."""
        if not self.carry:
            return {}
        tables = self._own_tables()
        parts = {"mean": tables.mean, "stage": tables.stage}
        for name, table in (("back", tables.back), ("words", tables.words.astype(np.float32))):
            codes, step = quantised(table.reshape(-1, table.shape[2]))
            parts |= {name: codes.reshape(table.shape), f"{name}_step": step.reshape(table.shape[:2])}
        return parts


@dataclass(frozen=True, eq=False)
class Reader:
    """Tables as float32: mean (H, D), back (H, D, D), stage (H, D), words (H, D, 256), and how many stages each head has."""

    mean: np.ndarray
    back: np.ndarray
    stage: np.ndarray
    words: np.ndarray
    stages: tuple[int, ...]

    @cached_property
    def basis(self) -> np.ndarray:
        """(H D + H, D) float32, of all rows that these tables read: the row of each component, then the mean of each head."""
        return np.concatenate([self.back.reshape(-1, self.back.shape[2]), self.mean]).astype(np.float32)

    @cached_property
    def for_kernel(self) -> tuple[Quantisers, mx.array]:
        """What a GPU's kernel has of all rows of these tables: quantisers, and `basis`. Components are of a size, by powers of two."""
        first = np.cumsum(self.stages) - np.array(self.stages)
        largest = np.abs(self.words).max(axis=2)
        size = np.exp2(np.frexp(np.where(largest > 0, largest, 1))[1].clip(-100, 100)).astype(np.float32)
        rows = np.concatenate([(self.back * size[..., None]).reshape(-1, self.back.shape[2]), self.mean]).astype(np.float32)
        basis = mx.array(rows)
        mx.eval(basis)
        return Quantisers.of_bytes(first[:, None] + self.stage, self.words / size[..., None]), basis

    @cached_property
    def columns(self) -> mx.array:
        """The code, of those of a row, that every component of all heads is read from, (H D,)."""
        first = np.cumsum(self.stages) - np.array(self.stages)
        return mx.array((first[:, None] + self.stage).reshape(-1).astype(np.uint32))

    @cached_property
    def rows(self) -> mx.array:
        """Where each component's values begin, (H D,)."""
        return mx.array(np.arange(self.stage.size, dtype=np.uint32) * np.uint32(WORDS))

    @cached_property
    def sums(self) -> list[mx.array]:
        """W of each head, stage by stage, (256 stages, D)."""
        return [
            mx.array(np.concatenate([words[stage == r].T @ back[stage == r] for r in range(count)]))
            for back, stage, words, count in zip(self.back, self.stage, self.words, self.stages, strict=True)
        ]


class AdditiveReader(RowReader):
    """Reads rows; components are the codes' own, one product with their basis makes a tile of rows of them."""

    def __init__(self, codec: CommVqAdditive, parts: dict[str, mx.array], shape: Shape) -> None:
        super().__init__(codec, parts, shape)
        self.tables = codec.reader(parts)

    @cached_property
    def stored(self) -> Any:
        heads, _, dim = self.shape
        if dim > native.max_dim():
            return None
        tables = self.tables
        first = np.cumsum(tables.stages) - np.array(tables.stages)
        place, table = 8 * (first[:, None] + tables.stage), np.arange(heads * dim).reshape(heads, dim) * WORDS
        rows = codewords(self.shape, "parts", self.parts["codes"], 1, place, 8, table, tables.words)
        rows.basis(tables.basis)
        return rows

    @cached_property
    def operand(self) -> ComponentKeys:
        quantisers, basis = self.tables.for_kernel
        return ComponentKeys(Components(self.shape, mx.contiguous(self.parts["codes"][0]), quantisers), basis)


def _wide(codes: np.ndarray, step: np.ndarray) -> np.ndarray:
    """float32 tables (H, D, m) of int8 codes and the step of each row; infinite where a hostile step overflows it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return dequantised(codes.reshape(-1, codes.shape[2]), step.reshape(-1)).reshape(codes.shape).astype(np.float32)
