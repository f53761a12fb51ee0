"""Codecs, kernels, caches and RoPE for MLX arrays."""

import os

# On CUDA, MLX rounds the factors of float32 products to 11 bits (TF32) unless told otherwise before its first product. Rows decoded on
# two devices would then differ by up to 3e-3 of the largest (tcz, 30 layers), not by rounding. MLX_ENABLE_TF32=1 has it back.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
