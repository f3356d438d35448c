"""Several ranks that compute one model together: who they are, and how they add up what each has."""
