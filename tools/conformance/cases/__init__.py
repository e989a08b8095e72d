"""Where cases come from: the ops' sets, models' graphs, files, random graphs."""
