"""Products of matrices: activations as kernels take them, and the kernels."""
