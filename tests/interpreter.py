"""Triton's interpreter with the numerics of a GPU, and with counters and checks for what it does to memory."""


def fix_numerics():
    """Make the interpreter round fp32 to bf16 to nearest even, keep bf16 denormals, and take Python floats as fp32."""
