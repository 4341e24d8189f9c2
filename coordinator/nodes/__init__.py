"""Nodes that are online: the questions to them, and what a plan needs to know of them."""
