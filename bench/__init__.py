"""The benchmark suite: `python -m bench` runs every group, `python -m bench kernels` one of them."""
