"""The CPU twins of `fused_rl.kernels`: modules and functions of the same names, in C, plain PyTorch and Inductor."""
