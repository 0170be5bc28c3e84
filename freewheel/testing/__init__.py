"""Conformance kits that check every Env, Runner, Collector and Learner, in our tests and in yours."""
