"""Kernels of mixtures of experts: routing, products with the matrices of chosen experts, biases, weighted sums."""
