"""What kernels of all families share, by dialect: plain Triton pieces, and Gluon twins of what Gluon kernels need."""
