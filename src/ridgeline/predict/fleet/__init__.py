"""Fleets: many engines, a router, transfers of caches, replicas that come and go."""
