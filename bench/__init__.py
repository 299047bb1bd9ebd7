"""The benchmark suite: `python -m bench`; one file per group, each also a script (`python bench/kernels.py`)."""
