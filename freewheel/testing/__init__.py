"""Worlds for tests and conformance kits, for our tests and for users' own."""
