"""Conformance: cases, each in a guarded step, judged against the float64 reference; what `graphrt test` is made of."""
