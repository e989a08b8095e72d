"""Running cases: each in a guarded step, in worker processes, judged and reported."""
