"""The verbs of the command line: one module each, imported when it is asked for. Their parts are the rooms beside."""
