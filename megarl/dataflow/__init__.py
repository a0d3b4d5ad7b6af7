"""Describes algorithms as graphs of model function calls on device meshes, and draws them.

graph and mesh are pure data and import no torch; graphs asks the algorithms, which do.
megarl.controller executes the graphs."""
