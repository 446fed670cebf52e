"""Constants of the cost model, and the timings on H200s that they are fitted to.

From sweeps' journals, without what a fit does not read (checks, peers, limits, policies). `sweep_h200_fifth`: of the
step kernel in the tree, f32 and bf16 states with four and one token, f16 states, 16 heads with six tokens. The others
are of the kernel before, whose machine code is the same for what they time but for the order of some factors:
`sweep_h200` with 96 heads of 80 beside the same, `sweep_h200_two_gpus` f32 with four tokens once more, on two others,
`windows_h200` the studies' windows of 8 to 64, the winners and the defaults.
"""
