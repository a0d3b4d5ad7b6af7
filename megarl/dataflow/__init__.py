"""Describes algorithms as graphs of model function calls on device meshes, and draws them.

Graphs and their drawings are pure data and import no torch; recipes asks the algorithms, which do.
megarl.controller executes the graphs."""
