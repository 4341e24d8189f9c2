"""Processes of this machine: components in the foreground, whole clusters, and what they leave behind."""
