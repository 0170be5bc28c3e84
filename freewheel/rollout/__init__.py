"""Acting: runners that drive one Env of B lanes, and the RunnerFactory that is sent to where they run."""
