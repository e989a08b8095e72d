"""Matrix products: which kernel makes each, in what form it reads its activations, and the launches."""
