"""A model over several ranks: which rank holds what of each weight, and what a rank's own model is made of."""
