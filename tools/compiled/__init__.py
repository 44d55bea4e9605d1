"""What a compiled train step says about itself, read without running it.

Here belong the compilation of a step for a target, the readers of the compiled program
(memory, collectives, and what runs beside them), and the report of both.
"""
