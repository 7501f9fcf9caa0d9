"""The kernels of the jit-fusion pass: group operations, run a group as one kernel, and check the kernel."""
