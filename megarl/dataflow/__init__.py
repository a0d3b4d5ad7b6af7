"""Describes algorithms as graphs of model function calls on device meshes; draws and plans them.

Graphs, their pictures, timelines and search are pure data and import no torch; costs, recipes and
command_line ask the planner and the algorithms, which do. megarl.controller executes the graphs."""
