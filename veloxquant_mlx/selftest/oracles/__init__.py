"""The right results of kernels, in float64 NumPy, one module per family. Imports nothing of ours."""
