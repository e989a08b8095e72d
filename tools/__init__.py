"""The command line: one module a verb, imported when it is asked for."""
