"""Gives the policy tools: environments that list and execute them (tooling, mcp, python), the calls
that a model writes (calls), and a sandbox for programs that nobody has read (sandbox, confine)."""
