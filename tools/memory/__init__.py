"""Parts of `graphrt memory`: what a prepared graph takes of memory, and when."""
