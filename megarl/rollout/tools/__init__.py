"""Gives the policy tools: environments that list and execute them (env, local, mcp, listed), the
calls that a model writes (calls), and a sandbox for programs that nobody has read (sandbox)."""
