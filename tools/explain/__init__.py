"""Parts of `graphrt explain`: how each step of a prepared graph is run, and why."""
