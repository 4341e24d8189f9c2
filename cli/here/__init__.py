"""What this machine knows of clusters: which one commands mean, demos that run, settings files and ports."""
