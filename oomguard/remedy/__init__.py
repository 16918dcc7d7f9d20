"""Plan changes: solve values for settings, apply the user's policy, and choose a patch."""
