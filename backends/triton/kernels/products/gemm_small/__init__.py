"""Products of up to 64 tokens: weights are read once for all of them and dequantized on their way."""
