"""What a compiled train step says about itself, read without running it.

Here belong the description of a target device, the compilation of a step for it, and
the readers of the compiled program: memory, collectives, and what runs beside them.
Programs that print or draw the results are in `tools`.
"""
