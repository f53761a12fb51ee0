"""Tests of kvtool. OpenBLAS is put in front of MLX's BLAS before anything imports MLX."""

from kvtool.blas import use_openblas

use_openblas()
