"""CAGE Challenge 2: a fast environment, the real simulator CybORG, the official evaluation, and workflow search."""
