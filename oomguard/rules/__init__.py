"""Load signature and rule files, check them, and match them with facts."""
