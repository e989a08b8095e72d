"""Adds up the thread time of named methods (their own callees included), a step."""
import time
spent = {}
def timed(owner, name, label=None, clock=time.thread_time):
    label = label or f"{owner.__name__.rsplit('.')[-1]}.{name}"
    f = getattr(owner, name)
    def inner(*a, **k):
        t = clock()
        try:
            return f(*a, **k)
        finally:
            s = spent.setdefault(label, [0, 0.0]); s[0] += 1; s[1] += clock() - t
    setattr(owner, name, inner)
def show(steps):
    for k, (n, s) in sorted(spent.items(), key=lambda e: -e[1][1]):
        print(f"  {k:45s} {n/steps:6.1f} x  {s/steps*1e3:.3f} ms")
