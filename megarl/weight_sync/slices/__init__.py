"""Sends weights slice by slice: each trainer rank what it holds, to the server ranks that keep it."""
