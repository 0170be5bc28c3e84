"""Several learners of one run: their shares of the plan, their agreements, and the learners after the first."""
