"""The rotations that a file may describe: what lies beyond has lost its meaning in float32 or float64, and is neither read nor written."""

from veloxquant_mlx.transfer.rope_spec import RopeSpec

# Faster than any RoPE turns (1 rad a token, a few with odd scalings): beyond it angles have lost their meaning in float64.
MAX_FREQUENCY = 1e4
MAX_ROPE_DIMS = 1 << 16
# Bases are float32 on the device.
MAX_BASE = 1e30
# YaRN and longrope scale keys by 1 to 2.
MAX_MAGNITUDE = 1e6


def beyond_limits(rope: RopeSpec) -> str | None:
    """What is wrong with a rotation, to follow "RoPE ", or None."""
    if rope.dims > MAX_ROPE_DIMS:
        return f"rotates {rope.dims} entries, more than {MAX_ROPE_DIMS}"
    try:
        fastest = max(map(abs, rope.frequencies))
    except ArithmeticError as error:
        return f"is not valid: {error}"
    if rope.base is not None and rope.base > MAX_BASE:
        return f"has base {rope.base:g}, more than {MAX_BASE:g}"
    if not 1 / MAX_MAGNITUDE <= rope.magnitude <= MAX_MAGNITUDE:
        return f"scales keys by {rope.magnitude:g}"
    if not fastest <= MAX_FREQUENCY:
        return f"turns by {fastest:g} rad a token, more than {MAX_FREQUENCY:g}"
    return None
