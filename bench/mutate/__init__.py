"""Mutation runs: would a test fail if this line were another one?"""
