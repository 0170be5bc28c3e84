"""CAGE Challenge 2: our own fast world, the real CybORG, the challenge's evaluation and workflow search."""
