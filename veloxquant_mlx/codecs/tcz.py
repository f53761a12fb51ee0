"""tcz-R: keys and values predicted from rows that are already decoded, the residuals entropy-coded. For storage: decoded when loaded.

    p = [rows that are decoded] P + b,   y = (x - p) F,   q = round(y / step),   x^ = p + step c(q) F^-1

P, b and F are a calibration's (`allocators.predictors`): keys are predicted from the keys and values of the layer before, values from
those and this layer's keys. F makes a unit of y cost the same nats in any layer, so that one step serves all.
c(q) is the mean of y in its cell (values: divided by E[y y^] / E[y^2]). Coding: `_entropy`; chunks of 256 tokens decode independently,
and q without p, so that another rounding of p moves x^ by no more than that.

Parts: stream U32 (1, words), the chunks' words one after another; index U32 (1, ceil(S / 256)), the number of words of each.
R is the average over keys and values of all layers; a codec bound to a layer has the step that meets it.
"""

import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx.allocators.predictors import LARGEST_SYMBOL, STEPS, TczTables
from veloxquant_mlx.allocators.predictors import RATES as DESIGNS
from veloxquant_mlx.allocators.symbol_models import CHUNK, centroids
from veloxquant_mlx.codecs import _entropy
from veloxquant_mlx.codecs._base import FLOAT16_MAX, Codec, Frame, Given, Layout, RoleName, Shape, token_blocks

RATES = (0.5, 3.0)
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_NAME = 64
_FIELDS = {"role", "rate", "step", "tables", "design", "layer", "after"}


@dataclass(frozen=True)
class Tcz(Codec):
    """Predicted, transformed, entropy-coded rows of one layer and role; unbound (as parsed) it has a rate and a role alone.

    Attributes:
        rate: bits a value over the whole cache.
        role: "k" or "v".
        step: of the components, square roots of nats.
        layer: its name in the calibration.
        before: name of the layer that predicts it, or None.
        digest: of the calibration.
        design: rate that the tables were made for.
        tables: the layer's tables, or None where they have to be found by the digest.
    """

    rate: float
    role: RoleName
    step: float | None = None
    layer: str | None = None
    before: str | None = None
    digest: str | None = None
    design: float | None = None
    tables: TczTables | None = field(default=None, compare=False, repr=False)
    id: ClassVar[str] = "tcz"
    read_natively: ClassVar[bool] = False

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, separator, rate = text.partition("-")
        if name != cls.id:
            return None
        if not separator or not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", rate) or not RATES[0] <= float(rate) <= RATES[1]:
            raise ValueError(f"[parse_codec] {text!r}: tcz-R has R from {RATES[0]:g} to {RATES[1]:g} bits a value, such as tcz-1.1.")
        return cls(float(rate), role)

    def spec(self, role: RoleName | None = None) -> str:
        return f"{self.id}-{self.rate:g}"

    def bind(self, role: RoleName, tables: TczTables, step: float, layer: str, after: str | None, digest: str) -> "Tcz":
        """The codec of one layer and role.

        Args:
            role: "k" or "v".
            tables: the layer's.
            step: for all layers and both roles the same.
            layer: its name in the calibration.
            after: the layer before it, whose decoded rows predict it; None where the tables have no such predictor.
            digest: the calibration's blake3.
        Raises:
            ValueError: `after` and the tables do not agree, or the step is out of range.
        """
        if tables.chained != (after is not None):
            raise ValueError(
                f"[tcz] layer {layer!r}: after must be {'a layer' if tables.chained else 'None'} for its tables, but got {after!r}."
            )
        if not STEPS[0] <= step <= STEPS[1]:
            raise ValueError(f"[tcz] step must be {STEPS[0]:g} to {STEPS[1]:g}, but got {step}.")
        return replace(self, role=role, step=step, layer=layer, before=after, digest=digest, design=tables.rate, tables=tables)

    @property
    def tokens_together(self) -> int:
        return CHUNK

    @property
    def eager(self) -> bool:
        return True

    @property
    def after(self) -> str | None:
        return self.before

    @property
    def needs(self) -> tuple[str, ...]:
        past = () if self.before is None else ("k-", "v-")
        return past if self.role == "k" else ("k", *past)

    @property
    def calibration(self) -> str | None:
        return self.digest if self.tables is None else None

    def with_tables(self, tables: TczTables) -> "Tcz":
        if not isinstance(tables, TczTables) or tables.chained != (self.before is not None) or tables.rate != self.design:
            found = f"design {tables.rate}, chained {tables.chained}" if isinstance(tables, TczTables) else type(tables).__name__
            raise ValueError(f"[tcz] layer {self.layer!r}: tables must be of design {self.design} after {self.before!r}, but got {found}.")
        return replace(self, tables=tables)

    def to_params(self) -> dict:
        self._bound()
        return {
            "role": self.role,
            "rate": self.rate,
            "step": self.step,
            "tables": self.digest,
            "design": self.design,
            "layer": self.layer,
            "after": self.before,
        }

    @classmethod
    def from_params(cls, params: dict) -> Self:
        if not isinstance(params, dict) or set(params) != _FIELDS:
            raise ManifestError(
                f"[tcz] params must be {sorted(_FIELDS)}, but got {sorted(params) if isinstance(params, dict) else params!r}."
            )
        role, rate, step, design = (params[name] for name in ("role", "rate", "step", "design"))
        if role not in ("k", "v"):
            raise ManifestError(f"[tcz] role must be 'k' or 'v', but got {role!r}.")
        for name, number, low, high in (("rate", rate, *RATES), ("step", step, *STEPS), ("design", design, *DESIGNS)):
            if isinstance(number, bool) or not isinstance(number, int | float) or not low <= number <= high:
                raise ManifestError(f"[tcz] {name} must be a number from {low:g} to {high:g}, but got {number!r}.")
        if not isinstance(params["tables"], str) or not _DIGEST.fullmatch(params["tables"]):
            raise ManifestError(f"[tcz] tables must be a calibration's blake3 in 64 hexadecimal digits, but got {params['tables']!r}.")
        for name, optional in (("layer", False), ("after", True)):
            value = params[name]
            if not (optional and value is None) and not (isinstance(value, str) and 0 < len(value) <= _MAX_NAME):
                raise ManifestError(f"[tcz] {name} must be a layer's name of at most {_MAX_NAME} characters, but got {value!r}.")
        return cls(float(rate), role, float(step), params["layer"], params["after"], params["tables"], float(design))

    def default_frame(self, role: RoleName) -> Frame:
        return "pre"

    def takes(self, dim: int) -> bool:
        return dim > 0 if self.tables is None else dim == self.tables.dim

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        return {"stream": ("U32", (1, -1)), "index": ("U32", (1, -(-shape[1] // CHUNK)))}

    def encode(self, x: mx.array, given: Given | None = None) -> dict[str, mx.array]:
        self._check_input(x)
        tables = self._bound(tuple(x.shape))
        self._check_finite(x)
        role, expected = getattr(tables, self.role), tables.expected(self.role, self.step)
        forward = mx.array(role.forward / np.float32(self.step))
        words, index = [], []
        for tokens, p in self._predicted(given, tuple(x.shape)):
            y = np.array((_wide(x[:, tokens].astype(mx.float32)) - p) @ forward)
            if not (np.abs(y) < LARGEST_SYMBOL).all():
                count = int((~(np.abs(y) < LARGEST_SYMBOL)).sum())
                where = f"{count} components of tokens {tokens.start} to {tokens.stop}"
                raise ValueError(f"[tcz] {where} are beyond 2^30 steps of {self.step:g}; --codec rvq-4 or raw stores them.")
            more, sizes = _entropy.encode(np.rint(y).astype(np.int32), expected)
            words.append(more)
            index.append(sizes)
        return {
            name: mx.array(np.concatenate([np.empty(0, np.uint32), *part])[None]) for name, part in (("stream", words), ("index", index))
        }

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype, given: Given | None = None) -> mx.array:
        tables = self._bound(shape)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        stream, index = (np.array(parts[name])[0] for name in ("stream", "index"))
        ends = np.concatenate([[0], np.cumsum(index, dtype=np.uint64)])
        if ends[-1] != len(stream):
            raise ManifestError(f"[tcz] part 'stream' must have the {ends[-1]} words that 'index' counts, but has {len(stream)}.")
        role, expected = getattr(tables, self.role), tables.expected(self.role, self.step)
        try:
            backward = mx.array(role.backward * np.float32(self.step))
        except ValueError as error:
            raise ManifestError(f"[tcz] layer {self.layer!r}: {error}") from error
        rows = []
        for tokens, p in self._predicted(given, shape):
            chunks = []
            for start in range(tokens.start, tokens.stop, CHUNK):
                words = stream[int(ends[start // CHUNK]) : int(ends[start // CHUNK + 1])]
                try:
                    q, classes = _entropy.decode_chunk(words, expected, min(CHUNK, tokens.stop - start))
                except ValueError as error:
                    raise ManifestError(f"[tcz] part 'stream', tokens from {start}: {error}") from error
                chunks.append(centroids(q, classes, self.role == "v"))
            decoded = p + mx.array(np.concatenate(chunks)) @ backward
            decoded = decoded.reshape(-1, shape[0], shape[2]).transpose(1, 0, 2)
            decoded = (mx.clip(decoded, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else decoded).astype(dtype)
            mx.eval(decoded)
            rows.append(decoded)
        return mx.concatenate(rows, axis=1) if rows else mx.zeros(shape, dtype)

    def _bound(self, shape: Shape | None = None) -> TczTables:
        """The tables.

        Raises:
            ValueError: there are none, or they are for other rows.
        """
        if self.step is None:
            raise ValueError(f"[tcz] {self.spec()} needs a calibration of the model: its predictors and bases.")
        if shape is None:
            return self.tables
        if self.tables is None:
            raise ValueError(f"[tcz] layer {self.layer!r} needs the tables of calibration {self.digest}.")
        if (shape[0], shape[2]) != (self.tables.heads, self.tables.dim):
            wanted = f"({self.tables.heads}, S, {self.tables.dim})"
            raise ValueError(f"[tcz] rows of layer {self.layer!r} must be {wanted} as in the calibration, but got {tuple(shape)}.")
        return self.tables

    def _predicted(self, given: Given | None, shape: Shape):
        """(tokens, p) block by block; the same blocks, so the same p, in encoding and decoding."""
        rows = self._checked_given(given, shape)
        for name, a in rows.items():
            if tuple(a.shape) != tuple(shape):
                raise ValueError(f"[tcz] given {name!r} must be {tuple(shape)}, but got {tuple(a.shape)}.")
        role = getattr(self.tables, self.role)
        weights, bias = mx.array(role.weights), mx.array(role.bias)
        for tokens in token_blocks(shape, CHUNK):
            tokens = slice(tokens.start, min(tokens.stop, shape[1]))
            inputs = [_wide(rows[name][:, tokens]) for name in self.needs]
            yield tokens, mx.concatenate(inputs, axis=1) @ weights + bias if inputs else bias[None]


def _wide(x: mx.array) -> mx.array:
    """(H, S, D) as (S, H D)."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
