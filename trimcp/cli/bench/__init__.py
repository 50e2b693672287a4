"""The command `trimcp bench`: from its options to its report."""
