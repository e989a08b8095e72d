"""What the debug tools share: what they look at (a model's step, a saved case, a script's graph), described as data."""
