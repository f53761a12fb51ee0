"""One-bit keys: random rotation, signs, and the magnitude that stands for all of a key's coordinates.

    y = H (diag * k) / sqrt(D)    (Sylvester order),    bit_i = y_i >= 0,    mag = sum_i |y_i| / D

RaBitQ (Gao and Long, SIGMOD 2024) with the L1 magnitude: mag (2 bit - 1) is the least-squares one-bit approximation of y.
"""

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend, natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, power_of_two, require
from veloxquant_mlx.metal._kernel import Kernel, dims
from veloxquant_mlx.native import kernels

MAX_D = 1024
THREADS = 128  # of a threadgroup: four SIMD-groups, each with its own rows

# Metal: a SIMD-group holds one row, or 32 / D rows where D < 32. CUDA: a lane holds 8 consecutive elements, so that it loads 16 bytes and
# stores one; a warp has 1024 elements in flight. Rows past the end compute on the last row and store nothing.
ENCODE = Kernel(
    name="rabitq_encode",
    inputs=("keys", "diag", "dims"),
    outputs=("k_bits", "k_mag"),
    sources=("bits", "rotate"),
    metal="""
    constexpr int W = D < 32 ? D : 32, R = D / W;
    const ushort lane = ushort(thread_index_in_simdgroup);
    const int row = int(thread_position_in_grid.x / 32) * (32 / W) + lane / W, last = dims[0] - 1;
    const device T* key = keys + size_t(min(row, last)) * D;
    float v[R], size = 0.0f;
    for (int r = 0; r < R; r++) v[r] = float(key[32 * r + lane % W]) * diag[32 * r + lane % W];
    kvtool::hadamard<D>(v, lane);
    for (int r = 0; r < R; r++) size += fabs(v[r]);
    for (int r = 0; r < R; r++) kvtool::pack_lanes<W>(v[r] >= 0.0f, k_bits + size_t(row) * (D / 8) + 4 * r, lane, row <= last);
    size = kvtool::row_sum<W>(size) / (float(D) * precise::sqrt(float(D)));
    if (row <= last && lane % W == 0) k_mag[row] = size;
    """,
    cuda="""
    constexpr int C = D > 256 ? D / 256 : 1, W = D < 256 ? D / 8 : 32, ROWS = 32 / W, TURNS = 4 / C;
    const uint32_t lane = threadIdx.x % 32, octet = lane % W;
    const int first = int((blockIdx.x * blockDim.x + threadIdx.x) / 32) * (ROWS * TURNS) + int(lane / W), last = dims[0] - 1;
    const bool aligned = kvtool::starts_at_16(keys);
    kvtool::Run<8, T> key[TURNS][C];
    for (int t = 0; t < TURNS; t++) {
      for (int c = 0; c < C; c++) key[t][c].load(keys + size_t(min(first + t * ROWS, last)) * D + 256 * c + 8 * octet, aligned);
    }
    float sign[C][8];
    for (int c = 0; c < C; c++) {
      for (int e = 0; e < 8; e++) sign[c][e] = diag[256 * c + 8 * octet + e];
    }
    for (int t = 0; t < TURNS; t++) {
      const int row = first + t * ROWS;
      float v[C][8], size = 0.0f;
      for (int c = 0; c < C; c++) {
        for (int e = 0; e < 8; e++) v[c][e] = key[t][c][e] * sign[c][e];
      }
      kvtool::hadamard_octets<D>(v, lane);
      for (int c = 0; c < C; c++) {
        uint32_t byte = 0;
        for (int e = 0; e < 8; e++) {
          byte |= v[c][e] >= 0.0f ? 1u << e : 0u;
          size += fabsf(v[c][e]);
        }
        if (row <= last) k_bits[size_t(row) * (D / 8) + 32 * c + octet] = uint8_t(byte);
      }
      size = kvtool::row_sum<W>(size) / (float(D) * sqrtf(float(D)));
      if (row <= last && octet == 0) k_mag[row] = size;
    }
    """,
)


def rabitq_encode(keys: mx.array, diag: mx.array) -> tuple[mx.array, mx.array]:
    """Rotated signs of keys, packed, and their mean absolute coordinate.

    Args:
        keys: (N, D) float16, bfloat16 or float32, D a power of two from 8 to 1024; not rotated yet.
        diag: (D,) float, +1 or -1.

    Returns:
        k_bits: (N, D // 8) uint8, coordinate 8 b + t at bit t of byte b, 1 where it is >= 0 (also for -0; not for NaN).
        k_mag: (N,) float32, sum |y| / D.

    Raises:
        ValueError: a shape does not fit.
        TypeError: another dtype.

    Error: float32 sums in the same order on every back end, so the bits agree everywhere; k_mag to 1e-6 relative.
    """
    name = "rabitq_encode"
    check_array(name, "keys", keys, None, FLOATS)
    fits = keys.ndim == 2 and power_of_two(keys.shape[1]) and 8 <= keys.shape[1] <= MAX_D
    require(fits, name, "keys", f"(N, D) with D a power of two from 8 to {MAX_D}", keys)
    rows, width = keys.shape
    check_array(name, "diag", diag, (width,), FLOATS)
    if rows == 0:
        return mx.zeros((0, width // 8), mx.uint8), mx.zeros((0,), mx.float32)
    if natively():
        return kernels.encode_signs(keys, diag.astype(mx.float32))
    if backend() == "cpu":
        return _ops(keys, diag)
    rows_of_warp = max(1, 1024 // width) if backend() == "cuda" else max(1, 32 // width)
    k_bits, k_mag = ENCODE(
        [keys, diag.astype(mx.float32), dims(rows)],
        template=[("T", keys.dtype), ("D", width)],
        grid=(32 * -(-rows // rows_of_warp), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, width // 8), (rows,)],
        output_dtypes=[mx.uint8, mx.float32],
    )
    return k_bits, k_mag


def _ops(keys: mx.array, diag: mx.array) -> tuple[mx.array, mx.array]:
    rows, width = keys.shape
    y = mx.hadamard_transform(keys.astype(mx.float32) * diag.astype(mx.float32))
    octets = (y >= 0).reshape(rows, width // 8, 8).astype(mx.uint8)
    return (octets << mx.arange(8, dtype=mx.uint8)).sum(axis=2).astype(mx.uint8), mx.abs(y).mean(axis=1)
