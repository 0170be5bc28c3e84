"""Learning: one file is one algorithm is one Learner, beside the pure functions they share."""
