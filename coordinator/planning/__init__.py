"""Plans: the layers of a model that each member holds."""
