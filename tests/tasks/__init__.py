"""Tasks of users, done by following pages of the site and nothing else."""
