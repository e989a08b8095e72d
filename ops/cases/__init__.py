"""Conformance cases of the ops, a module for each of their files: importing this package imports all of its modules,
which register them.

graphrt.testing.all_cases() imports it; nothing that builds or runs a graph does.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
