"""Several learners of one run: each one's share of the plan, what they agree about, and what all but the first do."""
