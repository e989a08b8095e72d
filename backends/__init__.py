"""The backends that graphrt ships. Third parties add theirs through the entry-point group `graphrt.backends`."""

#: Where discover() finds a backend of this tree: also from a checkout that was never installed.
BUILTIN = {"cpu": "graphrt.backends.cpu:CpuBackend", "triton": "graphrt.backends.triton:TritonBackend"}
