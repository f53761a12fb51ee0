"""Stores of prompt caches: objects in a folder or elsewhere, found by the tokens they stand for."""
