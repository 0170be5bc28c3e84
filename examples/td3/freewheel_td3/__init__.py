"""TD3 as a plug-in for Freewheel: one head, one learner."""
