"""What is measured: an operation a file, each by the protocol of `case.py`, all run by `bench/run.py`."""
