"""Constants of the cost model, and the timings on H200s that they are fitted to.

From sweeps' journals, without what a fit does not read (checks, peers, limits, policies). `sweep_h200`: of the step
kernel in the tree, f32 and bf16 states with four and one token, bf16 with W 32, f16 states, 16 heads with six tokens,
96 heads of 80, 256 heads. `windows_h200`: the studies' windows of 8 to 64, the winners and what a call got then. The
others are of kernels before, whose machine code is the same for what they time but for the order of some factors and
of the parameters: `sweep_h200_fifth` with more configs of the same cells, `sweep_h200_two_gpus` f32 with four tokens
once more, on two others.
"""
