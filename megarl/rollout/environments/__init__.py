"""Runs environments of the verifiers package, each in a worker with an interpreter of its own, and
trains on what the policy wrote in them."""
