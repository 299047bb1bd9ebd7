"""The CPU twins of `fused_rl.kernels`: modules and functions of the same names, in C, or plain PyTorch without it."""
