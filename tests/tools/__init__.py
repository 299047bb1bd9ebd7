"""What compilers make of the kernels, and how they behave in Triton's interpreter: tools of their tests and counts."""
