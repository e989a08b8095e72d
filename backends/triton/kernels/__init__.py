"""The Triton kernels, one folder or file a family."""
