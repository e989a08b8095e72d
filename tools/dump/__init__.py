"""Parts of `graphrt dump`: a graph as text, a page, a picture."""
