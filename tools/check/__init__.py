"""Parts of `graphrt check`: what would fall back, and whether launches that may overlap disturb each other."""
