"""Conformance kits: what every Env, Runner, Collector and Learner must do, for our tests and for yours."""
