"""Serves agents: an HTTP gateway in front of the generation servers, with a URL and a key for each
session, that records what the policy wrote token by token."""
