"""Holds what runs in the environments' own interpreter: scripts that import verifiers, never
megarl."""
