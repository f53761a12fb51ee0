"""The kernel API: one module per family, each public function runs on every back end."""

from veloxquant_mlx.metal._backend import metal_available

__all__ = ["metal_available"]
