"""Pages of a cache, and what they belong to: a data structure without tensors, which cache_paged.py gives memory."""
