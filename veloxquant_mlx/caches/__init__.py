"""Caches for mlx-lm that keep codes in memory."""
