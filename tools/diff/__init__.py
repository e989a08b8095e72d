"""Parts of `graphrt diff`: two ways of running, node by node."""
