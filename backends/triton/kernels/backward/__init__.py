"""Gradients of what moves, maps and reduces elements, losses and optimizers' steps."""
