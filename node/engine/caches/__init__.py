"""The caches of a model's layers: a module for each of mlx-lm's classes (`known` has the list)."""
