"""Parts of `graphrt trace`: what nodes hold, and where a NaN comes from."""
