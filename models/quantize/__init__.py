"""Quantizing models: which tensor gets which type (mixtures.py), how values become blocks (types.py, fit.py,
k_quants.py), what inputs say of weights' importance (imatrix.py), and a file made of another (run.py)."""
