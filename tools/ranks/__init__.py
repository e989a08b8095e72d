"""Starting a verb's ranks on this host, and ending them together."""
