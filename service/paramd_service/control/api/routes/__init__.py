"""REST routes: each module builds a router over the services it is given."""
