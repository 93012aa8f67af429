"""The kernels of graphcore: source, launcher and reference side by side."""
