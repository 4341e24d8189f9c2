"""Prompts: validation, limits and sealing."""
