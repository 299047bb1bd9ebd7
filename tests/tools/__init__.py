"""What compilers make of the kernels, how they behave in Triton's interpreter, and how much code there is."""
