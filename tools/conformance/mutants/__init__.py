"""Kernels with planted bugs in numpy, which the cases must find."""
