"""Flags of XLA with which tests, and the programs that they start, compile in half the
time."""

QUICK = (
    # XLA's newer emitters of fusions lower each by a pipeline of MLIR's, which is half
    # of what a small step compiles. The older ones write LLVM's code at once.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",  # programs are small
)
