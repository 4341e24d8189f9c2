"""Prompts: validation, sealing, which rows are where, prefixes and routing by them."""
