"""tc, a calibrated transform code of fixed rate: keys in the basis where errors cost independently, values predicted from them.

    y = (k - mean) forward,   k^ = y^ back + mean                      keys before RoPE, per head (`allocators.transforms`)
    r = v - v_mean - W^T y~,  v^ = v_mean + W^T y~ + s R^T q(R r / |r|)  values; y~ = (k^ - mean) forward over all heads of the layer

A component of the keys has 0 to 8 bits, by what an error of it costs, and the points of one of five generalised Gaussians, made unbiased.
What the predictions leave of the values is turned by a rotation R and has 1 to 6 bits per head, and Gaussian points; s is one unbiased
scale per row, <r, r> / <r, q>, in 6 bits: s = 2^(top - step code), 0 for the last code. The bits are handed out over keys and values of
all layers together (`allocators.transforms.widths_for`), scales included.

Tables are a calibration's, named by its digest, or carried: `back` as 8-bit numbers; `forward` as codes of 4 bits, which are enough as W
makes up for it; and W as codes of 0 to 8 bits a row, by what the row saves over the tokens that are coded: from a component to its own
head (`mix`) and to the others (`cross`). Codes stand in blocks of 32 tokens (`_components`), scales in blocks of 32 x 6 bits per head;
`tc_attend` attends to them as they are.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.allocators.carried_tables import (
    FORWARD_BITS,
    CarriedValues,
    RowCodes,
    carried_values,
    dequantised,
    joined,
    mix_widths,
    quantised,
    rounded_keys,
)
from veloxquant_mlx.allocators.shapes import MAX_BITS, SHAPES
from veloxquant_mlx.allocators.transforms import (
    GAUSSIAN,
    LEAST_RATE,
    MOST_RATE,
    SCALE_BITS,
    VALUE_BITS,
    KeyTables,
    TcTables,
    TcWidths,
    ValueTables,
    key_tables,
    value_tables,
)
from veloxquant_mlx.codecs._base import FLOAT16_MAX, SMALLEST, Codec, Frame, Given, Layout, RoleName, Shape, reciprocal, token_blocks
from veloxquant_mlx.codecs._components import BLOCK, Components
from veloxquant_mlx.codecs._reading import RowReader
from veloxquant_mlx.codecs._rotated import DEFAULT_SEED, ROTATION, SEEDS
from veloxquant_mlx.codecs._rotation import rotate
from veloxquant_mlx.codecs.tc_reading import TcKeyRows, TcValueRows
from veloxquant_mlx.codecs.tc_tables import FAR, ZERO, KeyReader, Predictor, ValueReader, per_head
from veloxquant_mlx.native import calibrated, converting, encoding

CARRIED = "carried"
MAX_HEADS = 1024
MAX_DIM = 1024
MAX_WIDTH = 1 << 13  # H D: decoding takes (H D)^2 numbers, whatever the size of the file
MAX_NAME = 64
STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # octaves from one scale's code to the next
TOP = 128  # the largest scale is below 2^TOP
_SLACK = 3.0  # octaves below the median scale that codes must reach: rows smaller than that are of no account


@dataclass(frozen=True)
class Tc(Codec):
    """Keys or values of one layer.

    Attributes:
        bits: average over K and V of all layers, which the widths were chosen for.
        role: "k" or "v".
        carry: whether tables go into the file; else `digest` names the calibration they are from.
        seed: of the values' rotation.
        layer: its name in the calibration; None until bound.
        digest: of the calibration.
        keys: widths of the keys' components, a digit each, a string per head; None until bound.
        widths: values alone: a digit per head.
        mix, cross: values with carried tables alone: a digit per component of the keys that has bits.
        tables: of the calibration, not part of what the codec is.
    """

    bits: float
    role: RoleName
    carry: bool = False
    seed: int = DEFAULT_SEED
    layer: str | None = None
    digest: str | None = None
    keys: tuple[str, ...] | None = None
    widths: tuple[str, ...] | None = None
    mix: str | None = None
    cross: str | None = None
    tables: TcTables | None = field(default=None, compare=False, repr=False)
    id: ClassVar[str] = "tc"

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "Tc | None":
        name, *options = text.split(":")
        if name != "tc" and not name.startswith("tc-"):
            return None
        if not re.fullmatch(r"tc-\d(\.\d{1,2})?", name) or not LEAST_RATE <= float(name[3:]) <= MOST_RATE:
            raise ValueError(f"[codec] {name!r}: write tc-N with N in {LEAST_RATE}..{MOST_RATE:g}, the average bits of a value (tc-2).")
        carry, seed = False, DEFAULT_SEED
        for word in options:
            if word == "carry":
                carry = True
            elif re.fullmatch(r"seed=\d{1,19}", word) and int(word[5:]) < SEEDS:
                seed = int(word[5:])
            else:
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are carry, seed=N.")
        return cls(float(name[3:]), role, carry, seed)

    def spec(self, role: RoleName | None = None) -> str:
        return f"tc-{self.bits:g}{':carry' if self.carry else ''}{'' if self.seed == DEFAULT_SEED else f':seed={self.seed}'}"

    def bind(
        self, role: RoleName, tables: TcTables, widths: TcWidths, layer: str, digest: str | None = None, tokens: int | None = None
    ) -> Self:
        """The codec of one layer and role.

        Args:
            widths: of this layer, of `widths_for` over all layers.
            layer: its name in the calibration.
            digest: of the calibration; None, or `carry`, puts the tables into the file.
            tokens: how many are coded, which carried tables are worth their size by; None: as many as the tables were learnt from.
        """
        carry = self.carry or digest is None
        bound = replace(self, role=role, carry=carry, layer=layer, digest=None if carry else digest, keys=widths.k)
        own = {"widths": widths.v} if role == "v" else {"widths": None, "seed": DEFAULT_SEED}  # keys are not rotated
        bound = replace(bound, **own, mix=None, cross=None).with_tables(tables)
        if role == "k" or not carry:
            return bound
        mix, cross = mix_widths(tables, bound.key_widths, tables.rows if tokens is None else tokens)
        return replace(bound, mix="".join(map(str, mix.tolist())), cross="".join(map(str, cross.tolist())))

    @property
    def grows(self) -> bool:
        return not self.carry

    @property
    def calibration(self) -> str | None:
        return self.digest if self.tables is None else None

    def with_tables(self, tables: Any) -> Self:
        heads, dim = self._size()
        if not isinstance(tables, TcTables) or (tables.heads, tables.dim) != (heads, dim):
            got = f"({tables.heads}, {tables.dim})" if isinstance(tables, TcTables) else type(tables).__name__
            raise ValueError(f"[{self.id}] tables of layer {self.layer!r} must be TcTables of (H, D) = ({heads}, {dim}), but got {got}.")
        return replace(self, tables=tables)

    @property
    def tokens_together(self) -> int:
        return BLOCK

    @property
    def needs(self) -> tuple[str, ...]:
        return ("k",) if self.role == "v" else ()

    def to_params(self) -> dict:
        self._size()
        params = {"role": self.role, "bits": self.bits, "keys": list(self.keys or ())}
        if self.role == "v":
            params |= {"widths": list(self.widths or ()), "rotation": ROTATION, "seed": self.seed}
            params |= {"mix": self.mix, "cross": self.cross} if self.carry else {}
        return params | {"tables": CARRIED if self.carry else self.digest, "layer": self.layer}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        role, bits, keys, tables, layer = (params.get(key) for key in ("role", "bits", "keys", "tables", "layer"))
        if role not in ("k", "v"):
            raise ManifestError(f"role must be 'k' or 'v', but got {role!r:.40}")
        if type(bits) not in (int, float) or not LEAST_RATE <= bits <= MOST_RATE:
            raise ManifestError(f"bits must be {LEAST_RATE}..{MOST_RATE:g}, but got {bits!r:.40}")
        if not isinstance(keys, list) or not 1 <= len(keys) <= MAX_HEADS or not all(_digits(head, MAX_DIM, MAX_BITS) for head in keys):
            raise ManifestError(f"keys must be 1..{MAX_HEADS} strings of 1..{MAX_DIM} digits 0..{MAX_BITS}, but got {keys!r:.40}")
        if len({len(head) for head in keys}) > 1:
            raise ManifestError(f"keys must be strings of one length, but got {sorted({len(head) for head in keys})}")
        if len(keys) * len(keys[0]) > MAX_WIDTH:
            raise ManifestError(f"keys must have {MAX_WIDTH} digits together at most, but got {len(keys)} x {len(keys[0])}")
        if tables != CARRIED and not (isinstance(tables, str) and re.fullmatch(r"[0-9a-f]{64}", tables)):
            raise ManifestError(f"tables must be {CARRIED!r} or 64 hexadecimal digits, but got {tables!r:.80}")
        if not isinstance(layer, str) or not 1 <= len(layer) <= MAX_NAME:
            raise ManifestError(f"layer must be a name of 1..{MAX_NAME} characters, but got {layer!r:.80}")
        carry = tables == CARRIED
        codec = cls(float(bits), role, carry, layer=layer, digest=None if carry else tables, keys=tuple(keys))
        if role == "k":
            return codec
        widths, rotation, seed = (params.get(key) for key in ("widths", "rotation", "seed"))
        if not isinstance(widths, list) or len(widths) != len(keys) or not all(_digits(w, 1, VALUE_BITS) and w != "0" for w in widths):
            raise ManifestError(f"widths must be {len(keys)} digits 1..{VALUE_BITS}, but got {widths!r:.40}")
        if rotation != ROTATION:
            raise ManifestError(f"rotation must be {ROTATION!r}, but got {rotation!r:.40}")
        if type(seed) is not int or not 0 <= seed < SEEDS:
            raise ManifestError(f"seed must be an integer in [0, 2**63), but got {seed!r:.40}")
        codec = replace(codec, seed=seed, widths=tuple(widths))
        if not carry:
            return codec
        rows, used = {name: params.get(name) for name in ("mix", "cross")}, int((codec.key_widths > 0).sum())
        for name, digits in rows.items():
            if not isinstance(digits, str) or not re.fullmatch(rf"[0-{MAX_BITS}]{{{used}}}", digits, re.ASCII):
                raise ManifestError(f"{name} must be {used} digits 0..{MAX_BITS}, but got {digits!r:.40}")
        return replace(codec, **rows)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"

    def takes(self, dim: int) -> bool:
        return 0 < dim <= MAX_DIM and (self.keys is None or dim == len(self.keys[0]))

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        if (heads, dim) != self._size():
            raise ValueError(f"[{self.id}] rows must have (H, D) = {self._size()}, but got ({heads}, {dim}).")
        blocks, used = -(-tokens // BLOCK), int((self.key_widths > 0).sum())
        if self.role == "k":
            parts: Layout = {"codes": ("U8", (1, blocks, 4 * int(self.key_widths.sum())))}
            if self.carry:
                parts["mean"] = ("F32", (heads, dim))
                parts |= {"back": ("I8", (used, dim)), "back_step": ("F32", (used,)), "shapes": ("U8", (used,))}
            return parts
        parts = {
            "codes": ("U8", (1, blocks, 4 * dim * int(self.value_widths.sum()))),
            "scales": ("U8", (1, blocks, heads * BLOCK * SCALE_BITS // 8)),
            "range": ("F16", (heads, 2)),
        }
        if self.carry:
            parts |= {"k_mean": ("F32", (heads, dim)), "v_mean": ("F32", (heads, dim))}
            for name, (size, widths) in self._carried_rows.items():
                parts |= {name: ("U8", (1, -(-size // BLOCK), 4 * int(widths.sum()))), f"{name}_step": ("F32", (used,))}
        return parts

    def encode(self, x: mx.array, given: Given | None = None) -> dict[str, mx.array]:
        self._check_input(x)
        self.layout(x.shape, x.dtype)
        if self.tables is None:
            raise ValueError(f"[{self.id}] layer {self.layer!r} needs a calibration to be encoded: bind the codec to its tables.")
        rows = self._given_keys(given, x.shape)
        if self.role == "k":
            codes = self._native_key_codes(x)
            parts = self._encode_keys(x) if codes is None else {"codes": codes, **self._carried_key_parts()}
        else:
            found = self._native_value_codes(x, rows["k"])
            parts = self._encode_values(x, rows["k"]) if found is None else self._value_parts(*found)
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype, given: Given | None = None) -> mx.array:
        parts = self.checked(parts, shape)
        rows = self._given_keys(given, shape)
        if converting.in_use(shape[2]):
            return self._decoded_natively(parts, shape, dtype, rows)
        out = mx.zeros(shape, dtype)
        keys = self.key_reader(parts) if self.role == "k" else None
        values = self.value_reader(parts) if self.role == "v" else None
        for tokens in token_blocks(shape, BLOCK):
            tiles = slice(tokens.start // BLOCK, -(-tokens.stop // BLOCK))
            if keys is not None:
                block = keys.rows(keys.components.unpack(parts["codes"][0, tiles]))
            else:
                assert values is not None
                block = values.predictor.predict(_tiles(rows["k"][:, tokens])) + values.added(parts, tiles)
            block = _joined(block, tokens.stop - tokens.start)
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: dict[str, mx.array], shape: Shape) -> RowReader:
        return (TcKeyRows if self.role == "k" else TcValueRows)(self, self.checked(parts, shape), shape)

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return None

    @cached_property
    def key_widths(self) -> np.ndarray:
        """(H, D) int."""
        self._size()
        return np.array([[int(digit) for digit in head] for head in self.keys or ()])

    @cached_property
    def value_widths(self) -> np.ndarray:
        """(H,) int."""
        self._size()
        return np.array([int(digit) for digit in self.widths or ()])

    @cached_property
    def _carried_rows(self) -> dict[str, tuple[int, np.ndarray]]:
        """Numbers in each row, and bits of each row (n,), of the parts that hold rows of tables."""
        heads, dim = self._size()
        bits = [np.array([int(digit) for digit in digits or ""], np.int64) for digits in (self.mix, self.cross)]
        forward = np.full(int((self.key_widths > 0).sum()), FORWARD_BITS)
        return {"forward": (dim, forward), "mix": (dim, bits[0]), "cross": ((heads - 1) * dim, bits[1])}

    def checked(self, parts: dict[str, mx.array], shape: Shape) -> dict[str, mx.array]:
        """The parts of rows (H, S, D), or a ValueError that says which does not fit."""
        return self._checked_parts(parts, self.layout(shape, mx.float32))

    def key_reader(self, parts: dict[str, mx.array]) -> KeyReader:
        """What turns codes into components and those into keys.

        Raises:
            ValueError: tables are missing.
            ManifestError: carried tables that are not finite.
        """
        if not self.carry:
            return self._key_reader
        mean, shapes = np.array(parts["mean"]), np.array(parts["shapes"])
        if shapes.max(initial=0) >= len(SHAPES):
            raise ManifestError(f"[{self.id}] part 'shapes' must be below {len(SHAPES)}, but got {shapes.max()}.")
        back = dequantised(np.array(parts["back"]), np.array(parts["back_step"])).astype(np.float32)
        self._check_tables(mean=mean, back_step=back)
        return KeyReader(self.key_widths, KeyTables(mean, back, None, shapes))

    def value_reader(self, parts: dict[str, mx.array]) -> ValueReader:
        """What turns keys into predictions, and codes and scales into what is added to them; raises as `key_reader`."""
        limits = np.array(parts["range"].astype(mx.float32))
        if not (np.abs(limits[:, 0]) <= TOP).all() or not np.isin(limits[:, 1], STEPS).all():
            got = f"{limits.tolist()!r:.80}"
            raise ManifestError(f"[{self.id}] part 'range' must be within {TOP} and one of {STEPS} for each head, but got {got}.")
        if self.carry:
            k_mean, v_mean = np.array(parts["k_mean"]), np.array(parts["v_mean"])
            rows = {name: self._unpacked(parts, name) for name in self._carried_rows}
            self._check_tables(k_mean=k_mean, v_mean=v_mean, **{f"{name}_step": table for name, table in rows.items()})
            mix = joined(rows["mix"], rows["cross"], np.nonzero(self.key_widths)[0])
            predictor = Predictor(self.key_widths, self.value_widths, ValueTables(k_mean, v_mean, rows["forward"], mix))
        else:
            predictor = self._predictor
        return ValueReader(predictor, self.seed, limits)

    def _size(self) -> tuple[int, int]:
        """H and D."""
        if self.keys is None:
            raise ValueError(f"[{self.id}] {self.spec()} needs a calibration: it is bound to each layer's tables first.")
        return len(self.keys), len(self.keys[0])

    def _check_tables(self, **tables: np.ndarray) -> None:
        for name, table in tables.items():
            if not np.isfinite(table).all():
                raise ManifestError(
                    f"[{self.id}] part {name!r} must be finite, but {np.count_nonzero(~np.isfinite(table))} values are not."
                )

    def checked_keys(self, given: Given | None, shape: Shape) -> mx.array:
        """The decoded keys that values of this shape are predicted from, float32 (H, S, D)."""
        return self._given_keys(given, shape)["k"]

    def _given_keys(self, given: Given | None, shape: Shape) -> dict[str, mx.array]:
        rows = self._checked_given(given, shape)
        if rows and tuple(rows["k"].shape) != tuple(shape):
            raise ValueError(f"[{self.id}] given 'k' must be float32 {tuple(shape)}, but got {tuple(rows['k'].shape)}.")
        return rows

    def _own_tables(self) -> TcTables:
        if self.tables is None:
            raise ValueError(f"[{self.id}] layer {self.layer!r} needs the calibration {self.digest}: give its tables (with_tables).")
        return self.tables

    @cached_property
    def _key_tables(self) -> KeyTables:
        return (rounded_keys if self.carry else key_tables)(self._own_tables(), self.key_widths)

    @cached_property
    def _key_reader(self) -> KeyReader:
        """Of the codec's own tables: one for all rows, however many segments they are in."""
        return KeyReader(self.key_widths, self._key_tables)

    @cached_property
    def _predictor(self) -> Predictor:
        """Of the codec's own tables, as `_key_reader`."""
        return Predictor(self.key_widths, self.value_widths, self._value_tables)

    @cached_property
    def _carried_values(self) -> CarriedValues:
        mix, cross = (self._carried_rows[name][1] for name in ("mix", "cross"))
        return carried_values(self._own_tables(), self.key_widths, mix, cross)

    @cached_property
    def _value_tables(self) -> ValueTables:
        return self._carried_values.tables() if self.carry else value_tables(self._own_tables(), self.key_widths)

    def _packed(self, name: str, rows: RowCodes) -> dict[str, mx.array]:
        """The parts of rows of tables."""
        size, widths = self._carried_rows[name]
        codes = np.zeros((len(widths), -(-size // BLOCK) * BLOCK), np.uint8)
        codes[:, :size] = rows.codes
        return {name: _rows_of(widths).pack(codes), f"{name}_step": mx.array(rows.step)}

    def _unpacked(self, parts: dict[str, mx.array], name: str) -> np.ndarray:
        """Rows of tables, (n, size) float32, from their parts."""
        size, widths = self._carried_rows[name]
        points = np.array(_rows_of(widths).unpack(parts[name][0])).swapaxes(0, 1).reshape(len(widths), -(-size // BLOCK) * BLOCK)[:, :size]
        return points * np.array(parts[f"{name}_step"])[:, None]

    def _native_key_codes(self, x: mx.array) -> mx.array | None:
        """The part `codes` by the native back end; None where it is not in use, or a value is not to be coded."""
        return calibrated.key_codes(self._key_coder, x, 4 * int(self.key_widths.sum())) if encoding.takes(x) else None

    def _native_value_codes(self, x: mx.array, keys: mx.array) -> tuple[mx.array, np.ndarray] | None:
        """The part `codes` and the rows' scales (H, S); None as of `_native_key_codes`."""
        if not encoding.takes(x):
            return None
        predictor = self._predictor
        return calibrated.value_codes(predictor.coder(self.seed), x, keys, predictor.components.block_bytes)

    @cached_property
    def _key_coder(self) -> Any:
        tables, reader = self._key_tables, self._key_reader
        assert tables.forward is not None
        first, *_ = reader.components.stored(self._size()[0])
        return calibrated.key_coder(first, tables.mean, tables.forward, *reader.components.cells())

    def _decoded_natively(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype, given: dict[str, mx.array]) -> mx.array:
        if self.role == "k":
            return converting.decoded(TcKeyRows(self, parts, shape).stored, 0, shape, dtype, parts=parts)
        values = self.value_reader(parts)
        rows = native.stored(shape)
        rows.components(native.packed(parts["codes"]), values.predictor.quantisers)
        rows.sizes(native.packed(parts["scales"]), values.quantisers)
        return calibrated.values(values.predictor.coder(self.seed), rows, given["k"], dtype)

    def _encode_keys(self, x: mx.array) -> dict[str, mx.array]:
        self._check_finite(x)
        tables = self._key_tables
        assert tables.forward is not None
        reader, forward = self._key_reader, per_head(self.key_widths, tables.forward)
        columns = mx.array(np.ascontiguousarray(forward.swapaxes(1, 2)).astype(np.float32))[:, None]
        blocks = []
        for tokens in token_blocks(x.shape, BLOCK):
            y = mx.matmul(mx.clip(_tiles(x[:, tokens].astype(mx.float32)) - reader.mean, -FAR, FAR), columns)
            codes = reader.components.codes(_by_component(y))
            codes[:, tokens.stop - tokens.start :] = 0
            blocks.append(reader.components.pack(codes))
        return {"codes": _concatenated(blocks, (1, 0, reader.components.block_bytes)), **self._carried_key_parts()}

    def _carried_key_parts(self) -> dict[str, mx.array]:
        if not self.carry:
            return {}
        tables = self._key_tables
        back, step = quantised(tables.back)
        return {"mean": mx.array(tables.mean), "back": mx.array(back), "back_step": mx.array(step), "shapes": mx.array(tables.shapes)}

    def _encode_values(self, x: mx.array, keys: mx.array) -> dict[str, mx.array]:
        self._check_finite(x)
        reader = self._predictor
        blocks, sizes = [], []
        for tokens in token_blocks(x.shape, BLOCK):
            count = tokens.stop - tokens.start
            left = _tiles(x[:, tokens].astype(mx.float32)) - reader.predict(_tiles(keys[:, tokens]))
            unit = mx.max(mx.abs(left), axis=-1, keepdims=True)
            y = rotate(left * reciprocal(unit), self.seed)
            norm = mx.sqrt(mx.mean(mx.square(y), axis=-1, keepdims=True))
            y = y * reciprocal(norm)
            flat = _by_component(y)
            codes = reader.components.codes(flat)
            q = reader.components.values(codes)
            heads = (x.shape[0], -1, flat.shape[1])
            ratio = _sums(flat, flat, heads) / _sums(flat, q, heads).clip(1e-30)
            sizes.append((np.array((unit * norm)[..., 0]).reshape(x.shape[0], -1) * ratio)[:, :count])
            zero = np.repeat(sizes[-1] < SMALLEST, x.shape[2], axis=0)
            codes[:, :count][zero] = 0
            codes[:, count:] = 0
            blocks.append(reader.components.pack(codes))
        codes = _concatenated(blocks, (1, 0, reader.components.block_bytes))
        return self._value_parts(codes, np.concatenate(sizes, axis=1) if sizes else np.zeros((x.shape[0], 0)))

    def _value_parts(self, codes: mx.array, sizes: np.ndarray) -> dict[str, mx.array]:
        """All parts of values, of their codes and the scale of each row (H, S)."""
        heads, tokens = sizes.shape
        scales, limits = scale_codes(sizes)
        whole = np.zeros((heads, -(-tokens // BLOCK) * BLOCK), np.uint8)
        whole[:, :tokens] = scales
        every = Components(np.full(heads, SCALE_BITS), np.full(heads, GAUSSIAN), unbiased=False)
        parts = {"codes": codes, "scales": every.pack(whole), "range": mx.array(limits).astype(mx.float16)}
        if self.carry:
            tables = self._value_tables
            parts |= {"k_mean": mx.array(tables.k_mean), "v_mean": mx.array(tables.v_mean)}
            carried = self._carried_values
            for name, rows in (("forward", carried.forward), ("mix", carried.mix), ("cross", carried.cross)):
                parts |= self._packed(name, rows)
        return parts


def scale_codes(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of scales (H, S), uint8, and (top, step) of each head, (H, 2) float32.

    The largest scale sets the top. The step is the finest that lets codes reach well below the median scale: rows smaller than that are
    of no account, but an outlier must not be all that is left.
    """
    codes, limits = np.full(sizes.shape, ZERO, np.uint8), np.tile(np.array([0.0, STEPS[0]], np.float32), (len(sizes), 1))
    for h, own in enumerate(sizes):
        kept = own >= SMALLEST
        if not kept.any():
            continue
        size = np.log2(own[kept])
        top = min(np.ceil(size.max() / STEPS[0]) * STEPS[0], TOP)
        reach = top - max(size.min(), np.median(size) - _SLACK)
        step = next((step for step in STEPS if step * (ZERO - 1) >= reach), STEPS[-1])
        code = np.rint((top - size) / step).clip(0, ZERO - 1)
        # A row far smaller than the smallest scale is nearer to none.
        codes[h, kept] = np.where(size < top - step * (ZERO - 1) - 1, ZERO, code)
        limits[h] = top, step
    return codes, limits


def _tiles(x: mx.array) -> mx.array:
    """(H, S, D) -> (H, blocks, 32, D), zeros behind. Products of tiles of one size do not depend on how many there are."""
    heads, tokens, dim = x.shape
    return mx.pad(x, [(0, 0), (0, -tokens % BLOCK), (0, 0)]).reshape(heads, -1, BLOCK, dim)


def _joined(tiles: mx.array, tokens: int) -> mx.array:
    heads, _, _, dim = tiles.shape
    return tiles.reshape(heads, -1, dim)[:, :tokens]


def _by_component(tiles: mx.array) -> np.ndarray:
    """(H, blocks, 32, D) -> (H D, tokens) float32."""
    heads, blocks, _, dim = tiles.shape
    return np.ascontiguousarray(np.array(tiles).reshape(heads, -1, dim).swapaxes(1, 2)).reshape(heads * dim, blocks * BLOCK)


def _rows_of(widths: np.ndarray) -> Components:
    """Codes of rows of tables, packed as components are, columns in place of tokens."""
    return Components(widths, np.full(len(widths), GAUSSIAN), unbiased=False)


def _sums(a: np.ndarray, b: np.ndarray, heads: tuple[int, int, int]) -> np.ndarray:
    """<a, b> of each row, float64."""
    return np.einsum("hdt,hdt->ht", a.reshape(heads), b.reshape(heads), dtype=np.float64)


def _concatenated(blocks: list[mx.array], empty: tuple[int, ...]) -> mx.array:
    return mx.concatenate(blocks, axis=1) if blocks else mx.zeros(empty, mx.uint8)


def _digits(text: object, most: int, largest: int) -> bool:
    return isinstance(text, str) and re.fullmatch(rf"[0-{largest}]{{1,{most}}}", text, re.ASCII) is not None
